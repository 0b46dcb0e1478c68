"""Calls that lead out of a graph: what they run is cast as in eager mode, or they are refused."""

import copy
from collections.abc import Callable
from typing import Any, Tuple  # noqa: UP035  # TorchScript reads it

import pytest
import torch
from agreement import AMBIENT, ambient_autocast, assert_agrees, assert_same, saved_and_loaded
from torch import nn
from versions import needs_register_autocast

import amp_script
from amp_script.errors import LoweringError
from amp_script.jit_state import AmbientState

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def _product(x: torch.Tensor, y: torch.Tensor):
    return torch.mm(x, y)


def _product_with_a_region(x: torch.Tensor):
    y = torch.mm(x, x)
    with torch.autocast("cpu", enabled=False):
        return torch.mm(y.float(), x)


def forked(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        future = torch.jit.fork(_product, x, x)
        y = torch.mm(x, x)
    return torch.jit.wait(future), y


def forked_outside(x: torch.Tensor):
    future = torch.jit.fork(_product_with_a_region, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.jit.wait(future), torch.jit.wait(torch.jit.fork(_product_with_a_region, x))


def forked_in_a_region_known_at_run_time(x: torch.Tensor, on: bool = True):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        future = torch.jit.fork(_product, x, x)
    return torch.jit.wait(future)


def forks_in_a_list(x: torch.Tensor):
    futures = [torch.jit.fork(_product, x, x)]
    with torch.autocast("cpu", dtype=torch.float16):
        for _ in range(2):
            futures.append(torch.jit.fork(_product, x, x))
    return [torch.jit.wait(future) for future in futures]


@torch.jit.ignore
def _python_product(x: torch.Tensor, times: int) -> torch.Tensor:
    return torch.mm(x, x) * times


def ignored(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = _python_product(x, 2)
        b = torch.mm(a, a)
    return a, b, _python_product(x, 3)


@torch.jit.unused
def _never(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


def unused(x: torch.Tensor, never: bool = False):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if never:
            x = _never(x)
        return torch.mm(x, x)


_traced = torch.jit.trace(lambda x: torch.mm(x, x) * 2 + torch.mm(x.half(), x.half()), (X,))


def traced(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = _traced(x)
    return y, _traced(x)


_scripted = amp_script.script(_product_with_a_region)


def scripted(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = _scripted(x)
    return y, _scripted(x)


@torch.jit.script
class _Pair:
    def __init__(self, x: torch.Tensor):
        self.x = x

    def product(self):
        return torch.mm(self.x, self.x)


def scripted_class(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _Pair(x).product()


@pytest.mark.parametrize(
    "program",
    [
        forked,
        forked_outside,
        forked_in_a_region_known_at_run_time,
        forks_in_a_list,
        ignored,
        unused,
        traced,
        scripted,
        scripted_class,
    ],
    ids=lambda program: program.__name__,
)
def test_calls_are_as_in_eager_mode(program: Callable[..., Any]) -> None:
    lowered = amp_script.script(program)
    assert_agrees(lowered, program, X)
    x = X.clone().requires_grad_()
    assert_same(lowered(x), lowered(X))


def test_forks_run_in_parallel_where_no_gradients_are_recorded() -> None:
    lowered = amp_script.script(forked)
    assert lowered.graph.findNode("prim::fork") is not None
    loaded = saved_and_loaded(amp_script.script(_Module(forked)))
    assert_agrees(loaded, forked, X, ambient=(None,))


class _Module(nn.Module):
    def __init__(self, program: Callable[..., Any]) -> None:
        super().__init__()
        self.program = program

    def forward(self, x: torch.Tensor):
        return self.program(x)


@pytest.mark.parametrize("ambient", AMBIENT)
def test_an_exception_in_python_leaves_no_state(ambient: torch.dtype | None) -> None:
    @torch.jit.ignore
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    def program(x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return failing(x)

    lowered = amp_script.script(program)
    with ambient_autocast(ambient):
        before = AmbientState.current()
        with pytest.raises(Exception, match="no"):
            lowered(X)
        assert AmbientState.current() == before
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


# Modules ------------------------------------------------------------------------------------------


@torch.jit.interface
class _Interface(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class _Implementation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor):
        return self.layer(x)


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

        def after(self, given: Tuple[torch.Tensor], x: torch.Tensor) -> torch.Tensor:  # noqa: UP006
            return torch.mm(x, x)

        def before(self, given: Tuple[torch.Tensor]) -> Tuple[torch.Tensor]:  # noqa: UP006
            return (torch.mm(given[0], given[0]),)

        self.layer.register_forward_hook(after)
        self.register_forward_pre_hook(before)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        return y, self.layer(x)


class _Exporting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.other(x)

    @torch.jit.export
    def other(self, x: torch.Tensor):
        y = self.layer(x)
        with torch.autocast("cpu", dtype=torch.float16):
            return y, torch.mm(x, x)


class _Parent(nn.Module):
    def __init__(self, child: nn.Module) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor):
        a = self.child(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return a, self.child(x)


def test_hooks() -> None:
    module = _Hooked()
    assert_agrees(amp_script.script(module), module, X)


class _RegionsInHooks(nn.Linear):
    """Its hooks are called from Python when it is called itself."""

    def __init__(self) -> None:
        super().__init__(4, 4)

        def before(self, input: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            with torch.autocast("cpu", enabled=False):
                return (torch.mm(input[0], input[0]),)

        def after(self, input: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                half = torch.mm(output, output)
            return torch.mm(half.float(), half.float())

        self.register_forward_pre_hook(before)
        self.register_forward_hook(after)


@pytest.mark.parametrize("copied", [lambda module: module, copy.deepcopy, copy.copy])
def test_hooks_that_python_calls(copied: Callable[[Any], Any]) -> None:
    module = _RegionsInHooks()
    assert_agrees(copied(amp_script.script(module)), module, X)


class _FirstCalledInRegions(nn.Module):
    """Methods and a property that TorchScript compiles while it is amid a region of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @property
    def weight(self) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.mm(self.layer.weight, self.layer.weight)

    def inner(self, x: torch.Tensor):
        with torch.autocast("cpu", enabled=False):
            return torch.mm(x.float(), self.layer.weight)

    def outer(self, x: torch.Tensor, times: int):
        for _ in range(times):
            with torch.autocast("cpu", dtype=torch.float16):
                x = torch.mm(self.inner(x), x.float())
                if times > 2:
                    return x
        return x

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.outer(x, 1)
            z = torch.mm(x, x)
            with torch.autocast("cpu", enabled=False):
                w = self.outer(x, 3), torch.mm(x, x), torch.mm(self.weight, x)
            v = torch.mm(x, x)
        return y, z, w, v, torch.mm(x, x)


def test_methods_that_are_first_called_in_regions() -> None:
    module = _FirstCalledInRegions()
    scripted = amp_script.script(module)
    assert_agrees(scripted, module, X)
    assert_agrees(saved_and_loaded(scripted), module, X, ambient=(None,))


def test_exported_methods() -> None:
    module = _Exporting()
    lowered = amp_script.script(module)
    assert_agrees(lowered, module, X)
    assert_agrees(lowered.other, module.other, X)


@pytest.mark.parametrize("compile_child", [torch.jit.script, amp_script.script, None])
def test_children_that_are_compiled_already(compile_child: Callable[..., Any] | None) -> None:
    child = _Exporting()
    before = str(torch.jit.script(child).graph)
    parent = _Parent(child)
    lowered = amp_script.script(_Parent(compile_child(child) if compile_child else child))
    assert_agrees(lowered, parent, X)
    assert str(torch.jit.script(child).graph) == before


def test_children_that_come_from_files(tmp_path: Any) -> None:
    child = _Exporting()
    torch.jit.script(child).save(tmp_path / "child.pt")
    for loaded in (
        torch.jit.load(tmp_path / "child.pt"),
        amp_script.lower(tmp_path / "child.pt"),
    ):
        assert_agrees(amp_script.script(_Parent(loaded)), _Parent(child), X)


def test_traced_children() -> None:
    child = torch.jit.trace(nn.Linear(4, 4), (X,))
    assert_agrees(amp_script.script(_Parent(child)), _Parent(child), X)


def test_interfaces_of_submodules_are_resolved() -> None:
    class WithInterface(nn.Module):
        part: _Interface

        def __init__(self) -> None:
            super().__init__()
            self.part = _Implementation()

        def forward(self, x: torch.Tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.part.forward(x)

    module = WithInterface()
    assert_agrees(amp_script.script(module), module, X)
    assert WithInterface.__annotations__ == {"part": _Interface}
    assert "__annotations__" not in module.__dict__


def test_interfaces_known_only_while_running_are_refused_with_their_line() -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([_Implementation(), _Implementation()])

        def forward(self, x: torch.Tensor, i: int):
            part: _Interface = self.parts[i]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return part.forward(x)

    with pytest.raises(LoweringError, match="known only while running") as caught:
        amp_script.script(Choosing())
    assert caught.value.source.endswith("return part.forward(x)")


@needs_register_autocast
def test_custom_operators_with_autocast_kernels() -> None:
    @torch.library.custom_op("amp_script_test_calls::product", mutates_args=())
    def operator(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, y)

    torch.library.register_autocast("amp_script_test_calls::product", "cpu", torch.float16)

    def program(x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.ops.amp_script_test_calls.product(x, x)
        return y, torch.ops.amp_script_test_calls.product(x, x)

    assert_agrees(amp_script.script(program), program, X)


def test_each_callee_is_lowered_once_for_each_state() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(4)]
            self.layers = nn.ModuleList(layers)

        def forward(self, x: torch.Tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for layer in self.layers:
                    x = layer(x)
            return x

    module = Deep().eval()
    lowered = amp_script.script(module)
    names = [
        node.inputsAt(0).node().s("name")
        for node in lowered.graph.findAllNodes("prim::CallFunction")
    ]
    assert len(set(names)) == 1
    x = torch.rand(2, 3, 8)
    assert_agrees(lowered, module, x, ambient=(None, torch.bfloat16))
    assert_agrees(saved_and_loaded(lowered), module, x, ambient=(None,))
