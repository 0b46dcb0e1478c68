"""autocast in torch.compile and torch.export: the graphs of torch.autocast, node for node."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_script
from amp_script.compiled import DYNAMO_TAKES_REGIONS
from amp_script.jit_state import AmbientState

Region = Callable[..., Any]
X = torch.randn(4, 4)


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Iterator[None]:
    torch.compiler.reset()
    before = AmbientState.current()
    yield
    assert AmbientState.current() == before


def within(region: Region) -> Region:
    def program(x: torch.Tensor) -> torch.Tensor:
        with region("cpu"):
            return torch.mm(x, x)

    return program


def arguments(region: Region) -> Region:
    def program(x: torch.Tensor) -> torch.Tensor:
        with region(device_type="cpu", dtype=torch.float16, enabled=True, cache_enabled=False):
            y = torch.mm(x, x)
        with region("cpu", torch.bfloat16, False, True):
            return torch.mm(y.float(), x)

    return program


def nested(region: Region) -> Region:
    def program(x: torch.Tensor) -> torch.Tensor:
        with region("cpu", torch.float16):
            y = torch.mm(x, x)
            with region("cpu", enabled=False):
                z = torch.mm(y.float(), x)
            with region("cpu", torch.bfloat16), region("cuda", torch.float16, enabled=False):
                return torch.mm(z, y)

    return program


def branches_and_loops(region: Region) -> Region:
    def program(x: torch.Tensor, turns: int = 3) -> torch.Tensor:
        for turn in range(turns):
            with region("cpu", enabled=turn != 1):
                x = torch.mm(x.float(), x.float())
            if turn == 2:
                with region("cpu"):
                    return torch.mm(x, x)
        return x

    return program


def made_and_used_later(region: Region) -> Region:
    def program(x: torch.Tensor) -> torch.Tensor:
        made = region("cpu")
        with made:
            y = torch.mm(x, x)
        with made:
            return torch.mm(y, y)

    return program


def decorating_inside(region: Region) -> Region:
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    def program(x: torch.Tensor) -> torch.Tensor:
        return region("cpu")(product)(x) + 1

    return program


def made_outside(region: Region) -> Region:
    made = region("cpu", torch.float16)

    def program(x: torch.Tensor) -> torch.Tensor:
        with made:
            y = torch.mm(x, x)
        return torch.mm(y.float(), x)

    return program


def made_outside_and_entered_twice(region: Region) -> Region:
    made = region("cpu", torch.float16)

    def program(x: torch.Tensor) -> torch.Tensor:
        with made:
            y = torch.mm(x, x)
        with made:
            return torch.mm(y.float(), x)

    return program


def decorated(region: Region) -> Region:
    @region("cpu", torch.float16)
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    return program


def calls_decorated(region: Region) -> Region:
    @region("cpu")
    def product(x: torch.Tensor, *, transpose: bool = False) -> torch.Tensor:
        return torch.mm(x, x.t() if transpose else x)

    def program(x: torch.Tensor) -> torch.Tensor:
        return product(x) + product(product(x), transpose=True)

    return program


def two_decorators(region: Region) -> Region:
    @region("cpu", torch.float16)
    @region("cpu", torch.bfloat16)
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    return program


def decorated_closure(region: Region) -> Region:
    weight, scale = torch.randn(4, 4), 3.0

    @region("cpu")
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight) * scale

    def program(x: torch.Tensor) -> torch.Tensor:
        return product(x)

    return program


MADE_INSIDE = (
    within,
    arguments,
    nested,
    branches_and_loops,
    made_and_used_later,
    decorating_inside,
)
MADE_OUTSIDE = (
    made_outside,
    made_outside_and_entered_twice,
    decorated,
    calls_decorated,
    two_decorators,
)
PROGRAMS = MADE_INSIDE + MADE_OUTSIDE


def module_of(program: Region) -> nn.Module:
    class Program(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return program(x)

    return Program()


class Methods(nn.Module):
    """What torch's class and ours are told to do in a module: ``region`` is a class attribute."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.region = region("cpu", torch.bfloat16)
        self.decorated = region("cpu", enabled=False)(self.linear.forward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region:
            return self.linear(x) + self.decorated(x)


def nodes(graph_module: torch.fx.GraphModule) -> list[list[tuple[str, ...]]]:
    """Return all that a graph and the graphs in it hold, as text."""
    return [
        [
            (n.op, n.name, getattr(n.target, "__name__", str(n.target)), str(n.args), str(n.kwargs))
            for n in module.graph.nodes
        ]
        for module in graph_module.modules()
        if isinstance(module, torch.fx.GraphModule)
    ]


def compiled(program: Region) -> tuple[list[Any], torch.Tensor]:
    graphs = []

    def backend(graph_module: torch.fx.GraphModule, _: object) -> Region:
        graphs.append(nodes(graph_module))
        return graph_module.forward

    torch.compiler.reset()
    result = torch.compile(program, backend=backend, fullgraph=True)(X)
    return graphs, result


def exported(program: Region, strict: bool) -> tuple[list[Any], torch.dtype | str]:
    """Return the graphs, and the dtype that the exported program gives, or the error.

    Some programs that torch exports it cannot run: it asserts the dtypes that it saw in tracing.
    """
    torch.compiler.reset()
    program = program if isinstance(program, nn.Module) else module_of(program)
    exported_program = torch.export.export(program, (X,), strict=strict)
    try:
        outcome = exported_program.module()(X).dtype
    except RuntimeError as error:
        outcome = str(error)
    return nodes(exported_program.graph_module), outcome


def entered(graphs: list[Any]) -> int:
    """Return how many regions graphs hold, in the two ways in which graphs hold them."""
    targets = [node[2] for graph in graphs for node in graph]
    return targets.count("_enter_autocast") + targets.count("wrap_with_autocast")


def needs(program: Region) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        program in MADE_INSIDE and not DYNAMO_TAKES_REGIONS,
        reason="test_versions shows that this torch is refused",
    )


@pytest.mark.parametrize("make", [pytest.param(p, marks=needs(p)) for p in PROGRAMS])
class TestPrograms:
    def test_compile_gives_one_graph_equal_to_torchs(self, make: Region) -> None:
        expected, _ = compiled(make(torch.autocast))
        graphs, result = compiled(make(amp_script.autocast))
        assert graphs == expected
        assert len(graphs) == 1
        assert entered(graphs[0])
        assert result.dtype is make(amp_script.autocast)(X).dtype

    @pytest.mark.parametrize("strict", [True, False])
    def test_export_keeps_the_regions_as_torchs_are_kept(self, make: Region, strict: bool) -> None:
        expected = exported(make(torch.autocast), strict)
        graphs, outcome = exported(make(amp_script.autocast), strict)
        assert (graphs, outcome) == expected
        assert entered(graphs)


@pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="torch.export there takes no such closures",
)
def test_a_decorated_closure_over_tensors() -> None:
    """Its graph is torch's, but the tensor is found in another place, and so named otherwise.

    In torch 2.6 it stands at another place among the inputs, too, and neither can be exported.
    """

    def named_alike(graphs: Any) -> list[str]:
        text = re.sub(r"(c_|l_)\w*closure\w*", "closed_over", str(graphs), flags=re.IGNORECASE)
        inputs = re.compile(r"\('placeholder'[^)]*\)', '\{\}'\)")
        return [*sorted(inputs.findall(text)), inputs.sub("", text)]

    expected, _ = compiled(decorated_closure(torch.autocast))
    graphs, result = compiled(decorated_closure(amp_script.autocast))
    assert named_alike(graphs) == named_alike(expected)
    assert result.dtype is torch.bfloat16
    for strict in (True, False) if torch.__version__ >= "2.7" else ():
        expected = exported(decorated_closure(torch.autocast), strict)
        ours = exported(decorated_closure(amp_script.autocast), strict)
        assert named_alike(ours) == named_alike(expected)


def test_a_module_with_instances_and_decorated_methods() -> None:
    torch.manual_seed(0)
    expected = Methods(torch.autocast)
    ours = Methods(amp_script.autocast)
    ours.load_state_dict(expected.state_dict())
    assert compiled(ours)[0] == compiled(expected)[0]
    for strict in (True, False):
        graphs, outcome = exported(ours, strict)
        assert (graphs, outcome) == exported(expected, strict)
        assert entered(graphs)
        assert outcome is ours(X).dtype


def test_gradients_through_aot_autograd() -> None:
    for make in (within, decorated, made_outside):
        if needs(make).args[0]:
            continue
        gradients = []
        for region in (torch.autocast, amp_script.autocast):
            x = X.clone().requires_grad_()
            run = torch.compile(make(region), backend="aot_eager", fullgraph=True)
            run(x).float().sum().backward()
            gradients.append(x.grad)
        assert torch.equal(*gradients)


def test_make_fx_before_dispatch_records_regions() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    graphs = [
        nodes(make_fx(nested(region), pre_dispatch=True)(X))
        for region in (torch.autocast, amp_script.autocast)
    ]
    assert graphs[0] == graphs[1]
    assert entered(graphs[1]) == 4


def test_an_exception_in_a_region_passes_through_export() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with amp_script.autocast("cpu"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        torch.export.export(module_of(program), (X,), strict=False)
    assert not torch.is_autocast_enabled("cpu")


def test_other_function_modes_are_not_told() -> None:
    class Spy(torch.overrides.TorchFunctionMode):
        called: tuple[Any, ...] = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.called += (func.__name__,)
            return func(*args, **(kwargs or {}))

    seen = []
    for region in (torch.autocast, amp_script.autocast):
        with Spy() as spy:
            result = nested(region)(X)
        seen.append((spy.called, result.dtype))
    assert seen[0] == seen[1]


def test_graph_breaks_leave_the_result_right() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with amp_script.autocast("cpu"):
            y = torch.mm(x, x)
            torch._dynamo.graph_break()
            return torch.mm(y, y)

    torch.compiler.reset()
    result = torch.compile(program, backend="eager")(X)
    assert torch.equal(result, program(X))
    assert result.dtype is torch.bfloat16


class Subclass(amp_script.autocast):
    pass


# Dynamo of torch 2.6 stops at what the subclass asks of torch, and says so.
@pytest.mark.filterwarnings(
    "ignore:Graph break due to unsupported builtin torch._C:UserWarning",
    "ignore:Dynamo does not know how to trace the builtin `torch._C:UserWarning",  # in torch 2.9
)
def test_a_subclass_made_inside_is_refused_and_otherwise_runs_eagerly() -> None:
    program = within(Subclass)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"a subclass of amp_script\.autocast"):
        torch.compile(program, backend="eager", fullgraph=True)(X)
    torch.compiler.reset()
    assert torch.compile(program, backend="eager")(X).dtype is torch.bfloat16
    assert compiled(made_outside(Subclass))[0] == compiled(made_outside(torch.autocast))[0]


def test_versions() -> None:
    """Which torch can make a region while Dynamo traces, and what the others say."""
    assert DYNAMO_TAKES_REGIONS is (torch.__version__ >= "2.12")
    torch.compiler.reset()
    program = within(amp_script.autocast)
    function = torch.compile(program, backend="eager", fullgraph=True)
    if DYNAMO_TAKES_REGIONS:
        assert function(X).dtype is torch.bfloat16
        return
    with pytest.raises(torch._dynamo.exc.Unsupported, match=torch.__version__.split("+")[0]):
        function(X)
    torch.compiler.reset()
    assert torch.compile(program, backend="eager")(X).dtype is torch.bfloat16


@pytest.mark.skipif(not DYNAMO_TAKES_REGIONS, reason="this torch is refused before")
def test_what_an_older_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_script.compiled.DYNAMO_TAKES_REGIONS", False)
    torch.compiler.reset()
    message = rf"torch {torch.__version__.split('+')[0]}.*cannot compile it, 2\.12 and later can"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        torch.compile(within(amp_script.autocast), backend="eager", fullgraph=True)(X)
