"""custom_fwd and custom_bwd against torch's, and where torch's fail."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from versions import needs_newer_dynamo

import amp_script
from amp_script.autograd import _cast
from amp_script.errors import CustomFunctionError
from amp_script.jit_state import AmbientState

Decorator = Callable[..., Any]
TORCH = (torch.amp.custom_fwd, torch.amp.custom_bwd)
OURS = (amp_script.custom_fwd, amp_script.custom_bwd)
MIXED = ((TORCH[0], OURS[1]), (OURS[0], TORCH[1]))
CASTS = (None, torch.float32, torch.float16, torch.bfloat16, torch.float64)


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Iterator[None]:
    before = AmbientState.current()
    yield
    assert AmbientState.current() == before


def ambients() -> Iterator[Any]:
    yield nullcontext()
    for dtype, enabled in itertools.product((torch.bfloat16, torch.float16), (True, False)):
        yield torch.autocast("cpu", dtype, enabled)


def state() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Seen:
    """What one function's forward and backward found."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def add(self, *things: Any) -> None:
        described = [t.dtype if isinstance(t, torch.Tensor) else t for t in things]
        self.found.append((state(), described))


def product(decorators: tuple[Decorator, Decorator], cast: torch.dtype | None, seen: Seen) -> Any:
    fwd, bwd = decorators

    class Product(Function):
        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast)
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
            """Multiply."""
            seen.add("forward", x, y)
            ctx.save_for_backward(x, y)
            ctx.scale = scale
            return torch.mm(x, y) * scale

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            x, y = ctx.saved_tensors
            seen.add("backward", grad, x, y)
            return torch.mm(grad, y.t()) * ctx.scale, torch.mm(x.t(), grad) * ctx.scale, None

    return Product


def outcome(
    function: Any, seen: Seen, ambient: Any, dtypes: tuple[torch.dtype, torch.dtype], double: bool
) -> Any:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 3, generator=generator).to(d).requires_grad_() for d in dtypes)
    try:
        with ambient:
            result = function.apply(x, y, 2.0)
        with torch.autocast("cpu", torch.float16):
            grads = torch.autograd.grad(result.double().sum(), (x, y), create_graph=double)
        if double:
            grads += torch.autograd.grad(sum(g.double().square().sum() for g in grads), (x, y))
    except RuntimeError as error:
        return str(error), seen.found
    return [(t.dtype, t.tolist()) for t in (result, *grads)], seen.found


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("decorators", [OURS, *MIXED], ids=["ours", "our bwd", "our fwd"])
def test_as_torchs(
    decorators: tuple[Decorator, Decorator], double: bool, cast: torch.dtype | None
) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for dtypes in [*zip(kinds, kinds, strict=True), (torch.float32, torch.bfloat16)]:
        for torchs_ambient, our_ambient in zip(ambients(), ambients(), strict=True):
            seen = Seen(), Seen()
            expected = outcome(
                product(TORCH, cast, seen[0]), seen[0], torchs_ambient, dtypes, double
            )
            ours = outcome(product(decorators, cast, seen[1]), seen[1], our_ambient, dtypes, double)
            assert ours == expected


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "nonsense"])
@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_other_device_types_as_torchs(device_type: str) -> None:
    results = []
    for fwd, bwd in (TORCH, OURS):

        class Double(Function):
            @staticmethod
            @fwd(device_type=device_type, cast_inputs=torch.float16)
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * 2

            @staticmethod
            @bwd(device_type=device_type)
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * 2

        x = torch.ones(2, requires_grad=True)
        try:
            Double.apply(x).sum().backward()
            results.append(x.grad.tolist())
        except RuntimeError as error:
            results.append(str(error))
    assert results[0] == results[1]


@pytest.mark.parametrize("device_type", [None, torch.device("cpu"), 0])
def test_device_types_that_are_no_string(device_type: Any) -> None:
    for theirs, ours in zip(TORCH, OURS, strict=True):
        with pytest.raises(ValueError, match="device_type") as expected:
            theirs(device_type=device_type)
        with pytest.raises(ValueError, match="device_type") as error:
            ours(device_type=device_type)
        assert str(error.value) == str(expected.value)


def test_decorated_at_once_or_in_two_steps_it_looks_like_the_function() -> None:
    def function(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Do something."""
        return x

    for decorator in OURS:
        for decorated in (
            decorator(function, device_type="cpu"),
            decorator(device_type="cpu")(function),
        ):
            assert decorated.__name__ == "function"
            assert decorated.__doc__ == "Do something."
            assert decorated.__wrapped__ is function


def test_a_stand_in_for_the_context() -> None:
    seen = []

    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        seen.append(state())
        return grad

    context = SimpleNamespace(save_for_backward=None)
    with torch.autocast("cpu", torch.float16):
        OURS[0](forward, device_type="cpu")(context, torch.ones(1))
    OURS[1](backward, device_type="cpu")(context, torch.ones(1))
    assert seen == [(True, torch.float16)]


# --- what is cast --------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


class Items(list):
    pass


class Wider(tuple):
    __slots__ = ()


T32 = torch.ones(2)
LEAVES: list[Any] = [
    T32,
    T32.bfloat16(),
    T32.double(),
    T32.int(),
    T32.bool(),
    T32.to(torch.complex64),
    T32.to("meta"),
    torch.tensor(1.0),
    torch.nn.Parameter(T32),
    *(None, 1, 2.5, "text", b"bytes", ..., torch.float32, object),
    np.ones(2),
]


def described(value: Any) -> Any:
    """Return a value's types all the way down, and dtypes in place of tensors."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.device.type
    if isinstance(value, np.ndarray):
        return type(value), value.dtype
    if isinstance(value, dict):
        return type(value), [(described(k), described(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [described(v) for v in value]
    if hasattr(value, "__next__"):
        return "iterator", [described(v) for v in value]
    return type(value), value


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda v: (v, v),
    lambda v: [v],
    lambda v: Items([v, v]),
    lambda v: Wider((v,)),
    lambda v: {"a": v},
    lambda v: collections.OrderedDict(a=v),
    lambda v: collections.defaultdict(list, a=v),
    lambda v: {"a": [(v, {"b": Items([v])})]},
    lambda v: (item for item in [v, v]),
    lambda v: collections.deque([v]),
    lambda v: torch.Size([1, 2]),
    lambda v: range(3),
    lambda v: (),
    lambda v: [],
    lambda v: {},
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_casts_as_torchs(dtype: torch.dtype) -> None:
    torchs = torch.amp.autocast_mode._cast
    for leaf in LEAVES:
        assert described(_cast(leaf, "cpu", dtype)) == described(torchs(leaf, "cpu", dtype))
        for contain in CONTAINERS:
            expected = described(torchs(contain(leaf), "cpu", dtype))
            assert described(_cast(contain(leaf), "cpu", dtype)) == expected


def test_named_tuples_keep_their_type_where_torch_fails() -> None:
    value = Pair(T32, [Pair(T32, "text")])
    with pytest.raises(TypeError):
        torch.amp.autocast_mode._cast(value, "cpu", torch.float16)
    cast = _cast(value, "cpu", torch.float16)
    half = torch.Tensor, torch.float16, "cpu"
    assert described(cast) == (Pair, [half, (list, [(Pair, [half, (str, "text")])])])


def test_torchs_own_results_keep_their_type() -> None:
    result = torch.max(torch.ones(2, 2), 0)
    cast = _cast(result, "cpu", torch.float16)
    assert type(cast) is type(result)
    assert cast.values.dtype is torch.float16
    assert cast.indices.dtype is torch.int64


def test_what_needs_no_cast_is_the_same_tensor() -> None:
    x = torch.ones(2, dtype=torch.float16)
    assert _cast(x, "cpu", torch.float16) is x
    assert _cast(T32, "cuda", torch.float16) is T32


def test_keyword_arguments_are_cast() -> None:
    def forward(ctx: Any, x: torch.Tensor, *, others: dict[str, torch.Tensor]) -> list[torch.dtype]:
        return [x.dtype, *(t.dtype for t in others.values())]

    results = []
    for fwd, _ in (TORCH, OURS):
        context = SimpleNamespace(save_for_backward=None)
        decorated = fwd(forward, device_type="cpu", cast_inputs=torch.float16)
        with torch.autocast("cpu"):
            results.append(decorated(context, T32, others={"a": T32, "b": T32.double()}))
    assert results[0] == results[1] == [torch.float16, torch.float16, torch.float64]


# --- functions with setup_context ----------------------------------------------------------------


def with_setup_context(
    decorators: tuple[Decorator, Decorator], cast: torch.dtype | None, seen: Seen
) -> Any:
    fwd, bwd = decorators

    class Product(Function):
        generate_vmap_rule = True

        @staticmethod
        @fwd(device_type="cpu", cast_inputs=cast)
        def forward(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
            seen.add("forward", x, y)
            return torch.mm(x, y) * scale

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            """Save the inputs."""
            ctx.save_for_backward(*inputs[:2])
            ctx.scale = inputs[2]

        @staticmethod
        @bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            x, y = ctx.saved_tensors
            seen.add("backward", grad)
            grad = grad.to(torch.float32)
            return torch.mm(grad, y.t()) * ctx.scale, torch.mm(x.t(), grad) * ctx.scale, None

    return Product


def test_torchs_fail_with_setup_context() -> None:
    """The fact that ours are for: if torch mends it, compare with torch's here too."""
    x = torch.ones(2, 2, requires_grad=True)
    result = with_setup_context(TORCH, None, Seen()).apply(x, x, 1.0)
    with pytest.raises(AttributeError):
        result.sum().backward()


@pytest.mark.parametrize("cast", [None, torch.float32, torch.float16])
def test_the_backward_runs_in_the_forwards_state(cast: torch.dtype | None) -> None:
    """The same states and dtypes as torch's give a function that is given its context."""
    for torchs_ambient, our_ambient in zip(ambients(), ambients(), strict=True):
        seen = Seen(), Seen()
        dtypes = torch.float32, torch.float32
        outcome(product(TORCH, cast, seen[0]), seen[0], torchs_ambient, dtypes, False)
        outcome(with_setup_context(OURS, cast, seen[1]), seen[1], our_ambient, dtypes, False)
        assert [s for s, _ in seen[1].found] == [s for s, _ in seen[0].found]
        assert [d[:2] for _, d in seen[1].found] == [d[:2] for _, d in seen[0].found]


def test_inputs_and_class_are_left_as_they_were() -> None:
    function = with_setup_context(OURS, None, Seen())
    x = torch.ones(2, 2, requires_grad=True)
    function.apply(x, x, 1.0)
    assert vars(x) == {}

    class Plain(Function):
        pass

    methods = ("generate_vmap_rule", "forward", "setup_context", "backward")
    assert set(vars(function)) == {*methods, *vars(Plain)}
    assert function.setup_context.__doc__ == "Save the inputs."


def test_calls_that_overlap_keep_their_own_states() -> None:
    seen = Seen()
    function = with_setup_context(OURS, None, seen)
    x = torch.ones(2, 2, requires_grad=True)
    results = []
    for ambient in ambients():
        with ambient:
            results.append(function.apply(x, x, 1.0))
    states = [s for s, _ in seen.found]
    seen.found.clear()
    for result in reversed(results):
        result.sum().backward()
    assert [s for s, _ in reversed(seen.found)] == states


def test_many_threads() -> None:
    seen = threading.local()

    class Identity(Function):
        @staticmethod
        @amp_script.custom_fwd(device_type="cpu")
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        @amp_script.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.state = state()
            return grad

    def work(index: int) -> None:
        dtype = (torch.bfloat16, torch.float16)[index % 2]
        for _ in range(50):
            x = torch.ones(2, requires_grad=True)
            with amp_script.autocast("cpu", dtype):
                result = Identity.apply(x)
            result.sum().backward()
            assert seen.state == (True, dtype)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_functorch() -> None:
    seen = Seen()
    function = with_setup_context(OURS, None, seen)
    x = torch.randn(2, 3, 3)
    with torch.autocast("cpu", torch.float16):
        gradient = torch.func.grad(lambda a: function.apply(a, a, 1.0).float().sum())
        torch.func.vmap(gradient)(x)
    assert {s for s, _ in seen.found} == {(True, torch.float16)}


def test_inherited_and_mixed_in() -> None:
    seen = Seen()
    base = with_setup_context(OURS, None, seen)

    class Sub(base):
        pass

    class Mixin:
        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(inputs[0])

    class Square(Mixin, Function):
        @staticmethod
        @amp_script.custom_fwd(device_type="cpu")
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x * x

        @staticmethod
        @amp_script.custom_bwd(device_type="cpu")
        @once_differentiable
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            seen.add("backward")
            return 2 * grad * x

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        results = Sub.apply(x, x, 1.0), Square.apply(x)
    seen.found.clear()
    for result in results:
        result.sum().backward()
    assert [s for s, _ in seen.found] == [(True, torch.float16)] * 2
    assert not hasattr(Mixin.setup_context, "__wrapped__")


def test_a_forward_that_did_not_record_is_named() -> None:
    class Bare(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        @amp_script.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(CustomFunctionError, match=r"Bare\.backward .*decorate the forward with"):
        Bare.apply(x).sum().backward()
    assert issubclass(CustomFunctionError, AttributeError)


def test_a_decorated_setup_context() -> None:
    """The way for a forward that is put together outside a class body."""
    seen = Seen()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    class Product(Function):
        @staticmethod
        @amp_script.custom_fwd(device_type="cpu")
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        @amp_script.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            seen.add("backward")
            return grad.float()

    Product.forward = staticmethod(amp_script.custom_fwd(forward, device_type="cpu"))
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        result = Product.apply(x)
    result.sum().backward()
    assert seen.found[0][0] == (True, torch.float16)


# --- custom operators ----------------------------------------------------------------------------

_seen = Seen()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


@amp_script.custom_bwd(device_type="cpu")
def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _seen.add("backward", grad)
    x, y = ctx.saved_tensors
    grad = grad.float()
    return torch.mm(grad, y.t()), torch.mm(x.t(), grad)


def operator(name: str, cast: torch.dtype | None, setup_context: Any = _save) -> Any:
    @torch.library.custom_op(f"amp_script_tests::{name}", mutates_args=())
    @amp_script.custom_fwd(device_type="cpu", cast_inputs=cast)
    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _seen.add("forward", x)
        return torch.mm(x, y).float()

    product.register_autograd(_backward, setup_context=setup_context)
    product.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))
    return product


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    _seen.found.clear()


@pytest.mark.parametrize("cast", [None, torch.float32])
def test_custom_operators(cast: torch.dtype | None) -> None:
    function = operator(f"product_{cast}".replace("torch.", ""), cast)
    for ambient in ambients():
        x = torch.randn(3, 3, requires_grad=True)
        with ambient:
            inside = state()
            result = function(x, x)
        forward = (inside[0] and cast is None, inside[1])
        result.sum().backward()
        assert [s for s, _ in _seen.found] == [forward, forward]
        assert vars(x) == {}
        _seen.found.clear()
        with torch.no_grad(), ambient:
            function(x, x)
        _seen.found.clear()


def test_an_operator_called_by_another_operators_function() -> None:
    """The inner call has no context, and must not take the outer one's."""
    inner = operator("inner", torch.float32)

    @torch.library.custom_op("amp_script_tests::outer", mutates_args=())
    @amp_script.custom_fwd(device_type="cpu")
    def outer(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return inner(x, y)

    outer.register_autograd(_backward, setup_context=_save)
    x = torch.randn(3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = outer(x, x)
    _seen.found.clear()
    result.sum().backward()
    assert [s for s, _ in _seen.found] == [(True, torch.bfloat16)]


# --- torch.compile -------------------------------------------------------------------------------


# Dynamo makes an instance of a function's class, and torch warns whoever does.
instantiates = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def traced(function: Any, backend: Any) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3, 3, generator=generator).requires_grad_() for _ in range(2))
    graphs: list[Any] = []

    def record(graph_module: torch.fx.GraphModule, _: object) -> Any:
        graphs.extend(
            (n.op, n.name, str(n.target).split(" at ")[0], str(n.args))
            for module in graph_module.modules()
            if isinstance(module, torch.fx.GraphModule)
            for n in module.graph.nodes
        )
        return graph_module

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return function.apply(x, y, 2.0)

    torch.compiler.reset()
    result = torch.compile(run, backend=backend or record, fullgraph=True)(x, y)
    result.float().sum().backward()
    return [graphs, result.dtype, x.grad.tolist()]


@instantiates
@needs_newer_dynamo
@pytest.mark.parametrize("cast", [None, torch.float32])
def test_compiled_as_torchs(cast: torch.dtype | None) -> None:
    expected, ours = (traced(product(both, cast, Quiet()), None) for both in (TORCH, OURS))
    assert ours == expected


class Multiply(Function):
    """Sees nothing but torch, so that Dynamo traces it."""

    @staticmethod
    @amp_script.custom_fwd(device_type="cpu")
    def forward(x: torch.Tensor, y: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.mm(x, y) * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    @staticmethod
    @amp_script.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, y = ctx.saved_tensors
        return torch.mm(grad, y.t()) * ctx.scale, torch.mm(x.t(), grad) * ctx.scale, None


@instantiates
@needs_newer_dynamo
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_setup_context(backend: str) -> None:
    """The same gradients as torch's give a function that is given its context."""
    _, dtype, gradient = traced(Multiply, backend)
    assert [dtype, gradient] == traced(product(TORCH, None, Quiet()), backend)[1:]


class Quiet(Seen):
    """Adds nothing, so that Dynamo has nothing to trace."""

    def add(self, *things: Any) -> None:
        pass


def test_compiled_custom_operators() -> None:
    """An operator's function is not run when it is traced; then setup_context has to record."""

    def run(function: Any) -> torch.Tensor:
        x = torch.randn(3, 3, requires_grad=True)

        def program(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu"):
                return function(x, x)

        torch.compiler.reset()
        return torch.compile(program, backend="aot_eager", fullgraph=True)(x)

    with pytest.raises(Exception, match=r"in torch\.compile also the setup_context"):
        run(operator("traced", None))
    recording = amp_script.custom_fwd(_save, device_type="cpu")
    run(operator("traced_and_recording", None, recording)).sum().backward()
