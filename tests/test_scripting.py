"""Scripted modules and functions as objects: what a plain ScriptModule can do, and who calls it."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import AMBIENT, ambient_autocast, assert_agrees, assert_same, saved_and_loaded
from torch import nn
from torch._jit_internal import _overload
from torch.jit import _recursive, _script

import amp_script
from amp_script.errors import ArgumentError, LoweringError
from amp_script.jit_state import AmbientState
from amp_script.scripting import LoweredFunction, LoweredModule, cast_cache


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, times: int = 2):
        y = self.layer(x) * self.scale
        with torch.autocast("cpu", enabled=False):
            z = torch.mm(x.float(), x.float()) * times
        return y, z


class Whole(nn.Module):
    limit: int

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.dropout = nn.Dropout(0.5)
        self.limit = 3

    def forward(self, x: torch.Tensor, times: int = 2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, z = self.part(x, times)
        return self.dropout(y.float()), z, torch.mm(z, z), self.limit

    @torch.jit.export
    def other(self, x: torch.Tensor, y: torch.Tensor | None = None):
        return torch.mm(x, x if y is None else y)


X = torch.linspace(-1, 1, 16).reshape(4, 4)


def whole() -> Whole:
    torch.manual_seed(0)
    return Whole().eval()


# Modules ------------------------------------------------------------------------------------------


def test_it_is_a_script_module_with_the_parameters_of_the_original() -> None:
    module = whole()
    scripted = amp_script.script(module)
    assert isinstance(scripted, torch.jit.ScriptModule)
    assert isinstance(scripted.part, LoweredModule)
    assert scripted.part.layer.weight is module.part.layer.weight
    assert [name for name, _ in scripted.named_parameters()] == [
        name for name, _ in module.named_parameters()
    ]
    assert scripted.state_dict().keys() == module.state_dict().keys()
    assert amp_script.script(scripted) is scripted
    assert scripted.original_name == "Whole"
    for text in ("graph", "code", "inlined_graph"):
        assert str(getattr(scripted, text))
        assert str(getattr(scripted.forward, text))


def test_positional_named_and_default_arguments() -> None:
    module = whole()
    scripted = amp_script.script(module)
    calls: list[Callable[[Any], Any]] = [
        lambda each: each(X),
        lambda each: each(x=X, times=3),
        lambda each: each.part(X, 5),
        lambda each: each.other(X),
        lambda each: each.other(X, y=X.t()),
    ]
    for dtype in AMBIENT:
        for call in calls:
            # Each in a region of its own: eager autocast's cache does not tell dtypes apart.
            with ambient_autocast(dtype):
                want = call(module)
            with ambient_autocast(dtype):
                assert_same(call(scripted), want)
        with ambient_autocast(dtype):
            with pytest.raises(RuntimeError, match="Unknown keyword argument 'wrong'"):
                scripted(X, wrong=1)
            with pytest.raises(RuntimeError, match="missing value for argument 'x'"):
                scripted()


def test_submodules_and_methods_follow_the_caller_too() -> None:
    module = whole()
    scripted = amp_script.script(module)
    assert_agrees(scripted, module, X)
    assert_agrees(scripted.part, module.part, X)
    assert_agrees(scripted.part.layer, module.part.layer, X)
    assert_agrees(scripted.other, module.other, X)


def test_a_disabled_region_around_a_call_is_no_region() -> None:
    module = whole()
    scripted = amp_script.script(module)
    with torch.autocast("cpu", enabled=False):
        assert_same(scripted(X), module(X))
        with torch.autocast("cpu", dtype=torch.float16):
            assert_same(scripted(X), module(X))


def test_training_and_evaluation() -> None:
    module = whole()
    scripted = amp_script.script(module)
    for train in (True, False):
        module.train(train)
        scripted.train(train)
        assert scripted.part.training == scripted.training == train
        for dtype in AMBIENT:
            with ambient_autocast(dtype):
                torch.manual_seed(1)
                want = module(X)
                torch.manual_seed(1)
                assert_same(scripted(X), want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_conversion_to_another_dtype(dtype: torch.dtype) -> None:
    module = whole()
    scripted = amp_script.script(copy.deepcopy(module))
    assert_agrees(scripted, module, X, ambient=(None,))
    scripted.to(dtype)
    module.to(dtype)
    assert scripted.part.layer.weight.dtype == dtype
    assert_agrees(scripted, module, X.to(dtype))


def test_loading_a_state() -> None:
    module, other = whole(), whole()
    scripted = amp_script.script(module)
    assert_agrees(scripted, module, X)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    scripted.load_state_dict(other.state_dict())
    assert_agrees(scripted, other, X)


def test_copies() -> None:
    module = whole()
    scripted = amp_script.script(module)
    deep, shallow = copy.deepcopy(scripted), copy.copy(scripted)
    assert isinstance(deep.part, LoweredModule)
    assert_agrees(deep, module, X)
    assert_agrees(shallow, module, X)
    with torch.no_grad():
        module.part.layer.weight.add_(1)
    assert_agrees(shallow, module, X)
    assert not torch.equal(deep.part.layer.weight, module.part.layer.weight)


def test_a_deep_copy_can_be_trained() -> None:
    def gradients(trained: nn.Module) -> list[torch.Tensor | None]:
        trained.zero_grad()
        with amp_script.autocast("cpu", dtype=torch.bfloat16):
            (trained(X) + trained(X)).float().square().sum().backward()
        return [parameter.grad for parameter in trained.parameters()]

    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[0].bias.requires_grad_(False)
    copied = copy.deepcopy(amp_script.script(module))
    for got, want in zip(gradients(copied), gradients(module), strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


def test_replicas_for_data_parallel() -> None:
    lowered = amp_script.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    for module in lowered.modules():
        assert type(module._replicate_for_data_parallel()) is type(lowered)


def test_pickling_is_refused_as_for_a_plain_script_module() -> None:
    scripted = amp_script.script(whole())
    with pytest.raises(Exception, match="serialize") as ours:
        pickle.dumps(scripted)
    with pytest.raises(Exception, match="serialize") as plain:
        pickle.dumps(torch.jit.script(whole()))
    assert type(ours.value) is type(plain.value)


def test_attributes_can_be_read_and_set() -> None:
    module = whole()
    scripted = amp_script.script(module)
    scripted.limit = module.limit = 7
    scripted.part.scale = module.part.scale = torch.full((4,), 2.0)
    assert scripted.limit == 7
    assert_agrees(scripted, module, X)


def test_a_submodule_cannot_be_replaced_and_takes_another_ones_state() -> None:
    module, scripted = whole(), amp_script.script(whole())
    replacement = Part()
    for value in (
        replacement,
        torch.jit.script(replacement),
        amp_script.script(replacement),
        amp_script.script(whole()).part,
    ):
        with pytest.raises(LoweringError, match=r"'part'.*\n.*module\.part\.load_state_dict"):
            scripted.part = value
    assert_agrees(scripted, module, X)
    scripted.part.load_state_dict(replacement.state_dict())
    module.part = replacement
    assert_agrees(scripted, module.eval(), X)


def test_an_attribute_of_another_type_is_refused_as_by_a_plain_script_module() -> None:
    with pytest.raises(RuntimeError) as ours:
        amp_script.script(whole()).limit = "three"
    with pytest.raises(RuntimeError) as plain:
        torch.jit.script(whole()).limit = "three"
    assert (type(ours.value), str(ours.value)) == (type(plain.value), str(plain.value))


def test_saving_keeps_the_program_for_no_ambient_autocast() -> None:
    module = whole()
    scripted = amp_script.script(module)
    with torch.autocast("cpu", dtype=torch.float16):
        scripted(X)
        loaded = saved_and_loaded(scripted)
    assert_agrees(loaded, module, X, ambient=(None,))
    assert_agrees(loaded.other, module.other, X, ambient=(None,))
    code = loaded.code + loaded.part.code
    assert "autocast_mode" not in code
    frozen = torch.jit.freeze(scripted)
    for _ in range(3):
        assert_same(frozen(X), module(X))


def test_plain_scripting_is_not_changed() -> None:
    module = whole()
    before = torch.jit.script(module).code
    amp_script.script(module)
    assert torch.jit.script(module).code == before
    assert torch._C._jit_set_autocast_mode(True) is True


def test_a_module_scripted_by_plain_torch_calls_the_program_for_no_ambient_autocast() -> None:
    class Parent(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor):
            return self.part(x)

    module = whole().part
    parent = torch.jit.script(Parent(amp_script.script(module)))
    assert_agrees(parent, module, X, ambient=(None,))


@pytest.mark.parametrize("flag", [True, False])
def test_the_jit_pass_flag_does_not_matter(flag: bool) -> None:
    module = whole()
    with amp_script.jit_autocast_pass(flag):
        scripted = amp_script.script(module)
        assert_agrees(scripted, module, X)


def test_threads_with_different_states_at_once() -> None:
    module = whole()
    scripted = amp_script.script(module)
    wrong: list[Any] = []
    start = threading.Barrier(6)

    def work(dtype: torch.dtype | None) -> None:
        try:
            with torch.no_grad(), ambient_autocast(dtype):
                want = module(X)
                start.wait()
                for _ in range(50):
                    assert_same(scripted(X), want)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(dtype,)) for dtype in AMBIENT * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_two_threads_can_compile_at_once() -> None:
    plain: list[Any] = []

    def compile_plainly() -> None:
        plain.extend(torch.jit.script(nn.Linear(4, 4)) for _ in range(20))

    thread = threading.Thread(target=compile_plainly)
    thread.start()
    scripted = [amp_script.script(whole()) for _ in range(5)]
    thread.join()
    assert len({each._c._type().qualified_name() for each in plain}) == 1
    assert_agrees(scripted[-1], whole(), X)


def test_weights_are_cast_once_in_the_callers_region() -> None:
    module = nn.Linear(4, 4)
    scripted = amp_script.script(module)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        scripted(X)
        with torch.profiler.profile() as profile:
            scripted(X)
    copies = [event for event in profile.key_averages() if event.key == "aten::_to_copy"]
    assert sum(event.count for event in copies) == 1  # the input, and neither weight nor bias


def test_casts_are_given_up_with_the_region() -> None:
    scripted = amp_script.script(nn.Linear(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scripted(X)
        assert cast_cache._caches.by_mode
    assert not cast_cache._caches.by_mode


# Functions ----------------------------------------------------------------------------------------


def function(x: torch.Tensor, times: int = 2):
    y = torch.mm(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return y, torch.mm(x, x) * times


def test_functions() -> None:
    scripted = amp_script.script(function)
    assert isinstance(scripted, torch.jit.ScriptFunction)
    assert amp_script.script(scripted) is scripted
    assert_agrees(scripted, function, X)
    assert_same(scripted(x=X, times=5), function(X, 5))
    assert scripted.code
    assert scripted.schema.name == "function"


def test_a_scripted_function_in_plainly_scripted_code() -> None:
    scripted = amp_script.script(function)

    def caller(x: torch.Tensor):
        return scripted(x)

    assert_agrees(torch.jit.script(caller), function, X, ambient=(None,))


def test_scripting_a_function_again_does_not_change_the_first() -> None:
    first = amp_script.script(function)
    code = first.code
    plain = torch.jit.script(function).code
    second = amp_script.script(function)
    assert first.code == code == second.code
    assert torch.jit.script(function).code == plain
    assert_agrees(first, function, X)
    assert_agrees(second, function, X)


@pytest.mark.parametrize(
    "register", [nn.Module.register_full_backward_hook, nn.Module.register_full_backward_pre_hook]
)
def test_backward_hooks_are_refused(register: Callable[..., Any]) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hook = register(module[0], lambda *_: None)
    with pytest.raises(LoweringError, match="module '0': it has backward hooks"):
        amp_script.script(module)
    hook.remove()
    amp_script.script(module)


def test_script_as_a_decorator() -> None:
    @amp_script.script
    def decorated(x: torch.Tensor):
        return torch.mm(x, x)

    assert isinstance(decorated, LoweredFunction)
    assert_agrees(decorated, lambda x: torch.mm(x, x), X)


def test_an_object_that_cannot_be_scripted() -> None:
    with pytest.raises(
        ArgumentError, match="obj is 3 of type int: expected a module or a function"
    ):
        amp_script.script(3)


# Decorators ---------------------------------------------------------------------------------------

OUTER = torch.float16


@torch.autocast("cpu", dtype=torch.bfloat16)
def torchs(x: torch.Tensor, times: int = 2):
    return torch.mm(x, x) * times


@amp_script.autocast("cpu", dtype=torch.float16)
def ours(x: torch.Tensor):
    y = torch.mm(x, x)
    return y, torchs(x, times=3)


def calling_decorated(x: torch.Tensor):
    return torchs(x), ours(x), torch.mm(x, x)


def _closed_over() -> Callable[..., Any]:
    helper = torchs

    @torch.autocast("cpu", enabled=False)
    def inner(x: torch.Tensor, times: int = 1):
        return helper(x), torch.mm(x, x) * times

    return inner


@torch.autocast("cpu", dtype=torch.bfloat16)
@torch.autocast("cpu", dtype=torch.float16)
def twice(x: torch.Tensor):
    return torch.mm(x, x)


@pytest.mark.parametrize(
    "program", [torchs, ours, calling_decorated, _closed_over(), twice], ids=lambda p: p.__name__
)
def test_decorated_functions(program: Callable[..., Any]) -> None:
    assert_agrees(amp_script.script(program), program, X)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: torch.Tensor):
        return self.layer(x), self.helper(x), torchs(x), self.other(x)

    @amp_script.autocast("cpu", enabled=False)
    def helper(self, x: torch.Tensor, times: int = 2):
        return self.layer(x) * times

    @torch.jit.export
    @torch.autocast("cpu", dtype=torch.float16)
    def other(self, x: torch.Tensor):
        return torch.mm(x, x)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Decorated(), Decorated()

    def forward(self, x: torch.Tensor):
        return self.first(x), self.second.helper(x), self.second.other(x)


@pytest.mark.parametrize("kind", [Decorated, Parent])
def test_decorated_methods(kind: Callable[[], nn.Module]) -> None:
    module = kind()
    scripted = amp_script.script(module)
    assert_agrees(scripted, module, X)
    assert_agrees(saved_and_loaded(scripted), module, X, ambient=(None,))


def test_nothing_is_left_changed() -> None:
    names = ["concrete_type_store", "make_stub", "make_stubs_for_overloads", "try_compile_fn"]
    before = [getattr(_recursive, name) for name in names]
    overload = _script._compile_function_with_overload
    state = AmbientState.current()
    amp_script.script(Parent())
    with pytest.raises(RuntimeError):
        amp_script.script(lambda x: x.no_such_method())
    assert [getattr(_recursive, name) for name in names] == before
    assert _script._compile_function_with_overload is overload
    assert AmbientState.current() == state
    assert torch._C._get_graph_executor_optimize()


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def product(self, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if bool(y.sum() > 1000):
                return y
            z = torch.mm(self.x, y)
        return z + 1


@_overload
def square(x: int) -> int: ...


@_overload
def square(x: torch.Tensor) -> torch.Tensor: ...  # noqa: F811


def square(x):  # noqa: F811
    if isinstance(x, torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(x, x)
    return x


class WithoutFunctions(nn.Module):
    """Its regions are where TorchScript compiles in other ways than functions and ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))

    @property
    def squared(self) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.mm(self.weight, self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Holder(x).product(x) + square(x) + self.squared + square(1)


def multiply_output(self, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(output, output)


def multiply_input(self, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (torch.mm(inputs[0], inputs[0]),)


def test_regions_in_classes_overloads_properties_and_hooks() -> None:
    module = WithoutFunctions()
    module.register_forward_pre_hook(multiply_input)
    module.register_forward_hook(multiply_output)
    assert_agrees(amp_script.script(module), module, X)


def test_a_scalar_constant_stays_a_tensor() -> None:
    scalar = torch.tensor(1.2345)

    def traced_part(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x @ x)[0, 0]
        return y + scalar, y - scalar, y * scalar, y / scalar

    class Adds(nn.Module):
        def __init__(self, part: Callable[[torch.Tensor], Any]) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.part(x)

    scripted = amp_script.script(Adds(torch.jit.trace(traced_part, X)))
    for program in (scripted, saved_and_loaded(scripted)):
        for _ in range(3):
            assert_same(program(X), Adds(traced_part)(X))
