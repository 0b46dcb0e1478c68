"""Compute plans: the same dtypes, as near to float32 as eager autocast, and no needless cast."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import opdb
import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_script import load, save, trace_and_freeze
from amp_script.compute import Kind
from amp_script.compute.dtypes import cast_dtype, infer
from amp_script.compute.operators import KINDS
from amp_script.compute.upcast import REDUCED, upcast
from amp_script.frozen import FrozenModule
from amp_script.lowering._graph import is_constant, nodes_of
from amp_script.metadata import InputSpec, Metadata

EVERY = dict.fromkeys(REDUCED, frozenset(Kind))
DTYPES = [torch.bfloat16, torch.float16]
PLANS = ["upcast", "packed"]


class Tagger(nn.Module):
    def __init__(self, recurrent: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = recurrent(24, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.output = nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(x)[0])


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = functional.relu(self.norm(self.first(x)))
        up = self.up(functional.relu(self.down(first)))
        return self.last(torch.cat([first, up], 1))


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(8, 32, 5, stride=2)
        self.grouped = nn.Conv1d(32, 16, 3, groups=4)
        self.up = nn.ConvTranspose1d(16, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(functional.gelu(self.grouped(functional.relu(self.first(x)))))


class Volume(nn.Module):
    """Views, transposed results and containers after convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(3, 16, 3, padding=1)
        self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.up(functional.relu(self.first(x)))
        return y, y.view(y.shape[0], -1), y.transpose(1, 2)


class NestedRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.last = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            scores = torch.softmax(y.float() @ y.float().t(), -1)
        return self.last(scores @ y), scores


class Writes(nn.Module):
    """Changes the result of one convolution in place between the uses of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.last = nn.Conv2d(8, 8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        y.relu_()
        y[:, 0] = 0
        before = self.last(y)
        y.add_(1)
        return before, self.last(y)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x, x, key_padding_mask=padding, need_weights=False)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "gru": (lambda: Tagger(nn.GRU), lambda: (torch.randn(2, 20, 24),)),
    "rnn": (lambda: Tagger(nn.RNN), lambda: (torch.randn(2, 20, 24),)),
    "u-net": (UNet, lambda: (torch.randn(2, 3, 32, 32),)),
    "conv1d": (Waves, lambda: (torch.randn(2, 8, 64),)),
    "conv3d": (Volume, lambda: (torch.randn(1, 3, 8, 8, 8),)),
    "nested region": (NestedRegion, lambda: (torch.randn(8, 32),)),
    "in place": (Writes, lambda: (torch.randn(1, 3, 16, 16),)),
    "encoder layer": (encoder, lambda: (torch.randn(2, 10, 64),)),
    "attention": (Attention, lambda: (torch.randn(2, 10, 64), torch.arange(10).expand(2, 10) > 7)),
}


def make(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]
    return model().eval(), inputs()


def tensors(value: Any) -> list[torch.Tensor]:
    return (
        [value]
        if isinstance(value, torch.Tensor)
        else [part for item in value for part in tensors(item)]
    )


def distance(given: Any, expected: Any) -> float:
    """The largest relative distance of an output."""
    return max(
        float((one.double() - other.double()).norm() / other.double().norm())
        for one, other in zip(tensors(given), tensors(expected), strict=True)
    )


def detached(value: Any) -> list[torch.Tensor]:
    """What the model gives with gradients on: under no_grad attention takes another way."""
    return [part.detach() for part in tensors(value)]


def again(frozen: FrozenModule, compute: Any) -> FrozenModule:
    """The same program with another plan."""
    return FrozenModule.wrap(frozen, frozen.metadata, compute=compute)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_plans_keep_dtypes_and_are_as_near_to_float32_as_eager(
    name: str, dtype: torch.dtype
) -> None:
    model, inputs = make(name)
    frozen = trace_and_freeze(model, inputs, dtype=dtype, compute="native", verify=False)
    reference = detached(model(*inputs))
    with torch.autocast("cpu", dtype):
        eager = detached(model(*inputs))
    for compute in PLANS:
        planned = again(frozen, compute)
        assert planned.compute == compute
        for _ in range(3):
            result = planned(*inputs)
        assert [part.dtype for part in tensors(result)] == [part.dtype for part in tensors(eager)]
        assert [part.shape for part in tensors(result)] == [part.shape for part in tensors(eager)]
        assert distance(result, reference) <= 1.05 * distance(eager, reference)


def gradients(run: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Of a weighted sum of all outputs, by each floating-point input."""
    given = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    outputs = tensors(run(*given))
    total = sum((y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum() for y in outputs)
    assert isinstance(total, torch.Tensor)
    return list(torch.autograd.grad(total, [x for x in given if x.requires_grad]))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "in place"])
def test_gradients_pass_every_plan(name: str) -> None:
    model, inputs = make(name)
    frozen = trace_and_freeze(model, inputs, compute="native", fold_batch_norm=False, verify=False)
    reference = gradients(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        eager = gradients(model, inputs)
    for compute in ("native", *PLANS):
        planned = again(frozen, compute)
        with torch.no_grad():
            before = planned(*inputs)
        for _ in range(3):
            given = gradients(planned, inputs)
            if compute == "native" and name != "nested region":
                assert all(map(torch.equal, given, eager))
            # How near gradients have to be nobody says; the results are as near as eager's.
            assert distance(given, reference) <= 1.25 * distance(eager, reference)
        with torch.no_grad():
            after = planned(*inputs)
        assert all(map(torch.equal, tensors(before), tensors(after)))
        assert planned.compute == compute


def test_gradients_reach_a_preserved_weight_through_packed_layers() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(3, 1, 1))
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x * self.scale)

    model, x = Scaled().eval(), torch.rand(1, 3, 8, 8)
    frozen: Any = trace_and_freeze(
        model, x, compute="packed", preserved_attrs=["scale"], verify=False
    )
    frozen(x).float().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        model(x).float().sum().backward()
    assert model.scale.grad is not None
    assert distance(frozen.scale.grad, model.scale.grad) < 0.02


# --- the graph ------------------------------------------------------------------------------------


def planned_graphs(names: Iterator[str] | list[str]) -> Iterator[torch._C.Graph]:
    for name in names:
        model, inputs = make(name)
        frozen = trace_and_freeze(model, inputs, compute="upcast", verify=False)
        yield frozen.baked("upcast").graph


@pytest.mark.parametrize("name", MODELS)
def test_no_kernel_works_on_a_reduced_dtype_and_no_cast_is_needless(name: str) -> None:
    (graph,) = planned_graphs([name])
    dtypes = infer(graph, {})
    casts: dict[object, int] = collections.Counter()
    for node in nodes_of(graph):
        if node.kind() in KINDS:
            assert dtypes.of_operands(node) not in REDUCED, node
        target = cast_dtype(node)
        if target is None:
            continue
        source = node.inputsAt(0)
        assert not is_constant(source), f"a constant is cast on each call: {node}"
        assert dtypes.of(source) is not target, f"cast to what it is: {node}"
        if target is torch.float32 and dtypes.of(source) in REDUCED:
            casts[source.debugName()] += 1
        if target in REDUCED:
            before = source.node()
            is_round_trip = cast_dtype(before) is torch.float32
            assert not (is_round_trip and dtypes.of(before.inputsAt(0)) is target), node
    if name != "in place":
        assert set(casts.values()) <= {1}, "a value is widened more than once"


def test_a_float32_neighbour_shares_the_cast() -> None:
    class Softmax(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = x @ x
            return torch.softmax(scores.float(), -1) + (scores @ scores).float()

    frozen = trace_and_freeze(Softmax().eval(), (torch.rand(8, 8),), compute="native", verify=False)
    graph = frozen.graph.copy()
    upcast(graph, {}, EVERY)
    scores = next(node for node in nodes_of(graph) if node.kind() == "aten::matmul")
    (rounded,) = [use.user for use in scores.output().uses()]
    assert cast_dtype(rounded) is torch.bfloat16
    users = [use.user for use in rounded.output().uses()]
    assert [cast_dtype(user) for user in users] == [torch.float32]


def test_weights_are_widened_once_even_when_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(300, 300))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(functional.linear(x, self.weight), self.weight)

    frozen = trace_and_freeze(Tied().eval(), (torch.rand(8, 300),), compute="native", verify=False)
    graph = frozen.baked("upcast").graph
    addresses = {
        node.output().toIValue().data_ptr()
        for node in nodes_of(graph)
        if node.kind() == "prim::Constant" and isinstance(node.output().toIValue(), torch.Tensor)
        if node.output().toIValue().numel() == 300 * 300
    }
    assert len(addresses) == 1


class Branches(nn.Module):
    """Operators in branches and loops, as scripted submodules leave them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16).bfloat16()
        self.last = nn.Linear(16, 16).bfloat16()

    def forward(self, x: torch.Tensor, steps: int, flag: bool) -> torch.Tensor:
        y = self.first(x.to(torch.bfloat16))
        for _ in range(steps):
            y = torch.tanh(self.last(y))
            y = self.first(y) if flag else y + self.last(y)
        return y


@pytest.mark.parametrize("compute", PLANS)
def test_branches_and_loops(compute: Any) -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    x = torch.randn(8, 16)
    metadata = Metadata("frozen", torch.bfloat16, "cpu", (InputSpec.of_tensor("x", x),))
    frozen = FrozenModule.wrap(torch.jit.freeze(torch.jit.script(model)), metadata, compute=compute)
    exact = Branches().eval()
    exact.load_state_dict(model.state_dict())
    exact.double()
    for steps in range(3):
        for flag in (True, False):
            result = frozen(x, steps, flag)
            assert result.dtype == torch.bfloat16
            torch.testing.assert_close(result, model(x, steps, flag), rtol=0.05, atol=0.02)
    assert frozen.compute == compute


class Promoting(nn.Module):
    """A layer, exact in any dtype, and something that promotes its result or may seem to.

    A plan rounds the product that follows to the dtype that it takes the operands to have.
    """

    def __init__(self, run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.run = run
        self.register_buffer("rows", torch.rand(8) + 0.5)
        self.register_buffer("scalar", torch.tensor(1.2345))
        nn.init.eye_(self.layer.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.run(self, self.layer(x))
        with torch.autocast("cpu", enabled=False):
            return y, y.expand(8, 8) @ y.expand(8, 8).t()


def write_to_column(m: Any, y: torch.Tensor) -> torch.Tensor:
    y[:, 0] += m.rows
    return y


def write_to_half(m: Any, y: torch.Tensor) -> torch.Tensor:
    y.float()[:4].mul_(y[4:])
    y[4:].copy_(m.rows)
    return y


PROMOTING: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "add_": lambda m, y: y.add_(m.rows),
    "add_ with alpha": lambda m, y: y.add_(m.rows, alpha=3),
    "mul_": lambda m, y: y.mul_(m.rows),
    "div_": lambda m, y: y.div_(m.rows),
    "clamp_": lambda m, y: y.clamp_(min=m.rows),
    "pow_": lambda m, y: y.abs_().pow_(m.rows),
    "add_ of less": lambda m, y: (m.rows * 1).add_(y[0]),
    "copy_": lambda m, y: y.copy_(m.rows),
    "masked_fill_": lambda m, y: y.masked_fill_(y > 1, m.scalar),
    "index_put_": lambda m, y: y.index_put_((torch.tensor([1]),), m.rows.to(y.dtype)),
    "out": lambda m, y: torch.add(m.rows, m.rows, out=y[0]),
    "a column": write_to_column,
    "a half": write_to_half,
    "relu_ after": lambda m, y: y.add_(m.rows).relu_(),
    "clamp": lambda m, y: torch.clamp(y, min=m.rows),
    "clamp_min": lambda m, y: torch.clamp_min(y, m.rows),
    "clamp_max": lambda m, y: torch.clamp_max(y, m.rows),
    "pow": lambda m, y: torch.pow(y.abs(), m.rows),
    "maximum of scalars": lambda m, y: torch.maximum(y[0, 0], m.scalar),
    "atan2 of scalars": lambda m, y: torch.atan2(y[0, 0], m.scalar),
    "add of a scalar": lambda m, y: y + m.scalar,
    "add of scalars": lambda m, y: y[0, 0] + m.scalar,
    "div of scalars": lambda m, y: y[0, 0] / m.scalar,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PROMOTING)
def test_what_promotes_does_so_under_every_plan(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Promoting(PROMOTING[name]).eval(), torch.randn(8, 8)
    frozen = trace_and_freeze(model, x, dtype=dtype, compute="native")
    with torch.no_grad(), torch.autocast("cpu", dtype):
        expected = model(x)
    for compute in ("native", *PLANS):
        planned = again(frozen, compute)
        for _ in range(3):
            result, product = planned(x)
            assert not opdb.difference(expected[0], result)
            assert product.dtype == expected[1].dtype


class InPlaceInside(nn.Module):
    """In-place operators in branches and loops, and a list that is changed in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False).bfloat16()
        self.register_buffer("rows", torch.rand(8) + 0.5)
        nn.init.eye_(self.layer.weight)

    def forward(self, x: torch.Tensor, steps: int) -> list[torch.Tensor]:
        y = self.layer(x.to(torch.bfloat16))
        found = [y]
        for step in range(steps):
            y = self.layer(y)
            if step > 0:
                y += self.rows
            else:
                y.mul_(self.rows)
            found.append(y.to(torch.float32))
        last = found[-1]
        return [y, y @ y, last @ last]


@pytest.mark.parametrize("compute", PLANS)
def test_in_place_operators_in_branches_and_loops(compute: Any) -> None:
    torch.manual_seed(0)
    model, x = InPlaceInside().eval(), torch.randn(8, 8)
    metadata = Metadata("frozen", torch.bfloat16, "cpu", (InputSpec.of_tensor("x", x),))
    native, planned = (
        FrozenModule.wrap(torch.jit.freeze(torch.jit.script(model)), metadata, compute=each)
        for each in ("native", compute)
    )
    for steps in range(4):
        expected = model(x, steps)
        assert [part.dtype for part in planned(x, steps)] == [part.dtype for part in expected]
        assert torch.equal(planned(x, steps)[0], native(x, steps)[0])
    assert planned.compute == compute


def test_a_float32_program_has_nothing_to_change() -> None:
    traced = torch.jit.trace(nn.Linear(8, 8).eval(), torch.rand(2, 8))
    metadata = Metadata("frozen", None, "cpu")
    frozen = FrozenModule.wrap(torch.jit.freeze(traced), metadata, compute="upcast")
    assert frozen.compute == "native"
    assert torch.equal(frozen(torch.ones(2, 8)), traced(torch.ones(2, 8)))


def test_a_program_with_nothing_to_change_keeps_its_constants() -> None:
    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.ones(300, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.offset.to(torch.float32)

    x = torch.rand(2, 300)
    traced = torch.jit.trace(Offset().eval(), x)
    module = torch.jit.freeze(traced, optimize_numerics=False)
    frozen = FrozenModule.wrap(module, Metadata("frozen", None, "cpu"), compute="packed")
    assert frozen.compute == "native"
    assert torch.equal(frozen(x), x + 1)


def test_an_argument_with_a_default_does_not_keep_layers_from_being_packed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3).bfloat16()

        def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return self.layer(x.to(torch.bfloat16)) * times

    x = torch.rand(1, 3, 8, 8)
    module = torch.jit.freeze(torch.jit.script(Scaled().eval()))
    metadata = Metadata("frozen", torch.bfloat16, "cpu", (InputSpec.of_tensor("x", x),))
    frozen = FrozenModule.wrap(module, metadata, compute="packed")
    kinds = {node.kind() for node in nodes_of(plan_graph(frozen))}
    assert "mkldnn::_convolution_pointwise" in kinds
    torch.testing.assert_close(frozen(x, 3), frozen(x) * 1.5, rtol=0.02, atol=0.02)


# --- packed weights -------------------------------------------------------------------------------


class Packable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, groups=64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.linear = nn.Linear(32, 2100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(functional.relu(self.second(self.first(x))))
        return self.linear(y.view(y.shape[0], y.shape[1], -1).transpose(1, 2))


@pytest.fixture(scope="module")
def packable() -> tuple[FrozenModule, FrozenModule]:
    """The same program upcast and packed."""
    torch.manual_seed(0)
    model = Packable().eval()
    frozen = trace_and_freeze(model, (torch.randn(1, 16, 12, 12),), compute="native", verify=False)
    return again(frozen.baked("upcast"), "upcast"), again(frozen, "packed")


@torch.no_grad()
def plan_graph(frozen: FrozenModule) -> torch._C.Graph:
    """What runs without gradients."""
    graph: torch._C.Graph = frozen.__dict__["_program"]._function("forward")._function.graph
    return graph


def test_layers_with_constant_weights_are_packed(
    packable: tuple[FrozenModule, FrozenModule],
) -> None:
    kinds = collections.Counter(node.kind() for node in nodes_of(plan_graph(packable[1])))
    assert kinds["mkldnn::_convolution_pointwise"] == 2
    assert kinds["mkldnn::_convolution_transpose_pointwise"] == 1
    assert kinds["mkldnn::_linear_pointwise"] == 1
    assert kinds["prim::ConstantMKLDNNTensor"] == 1
    assert not any(kind.startswith("mkldnn::_reorder") for kind in kinds)


SIZES = [(1, 12, 12), (3, 12, 12), (1, 20, 9), (2, 5, 30)]


def image(batch: int, height: int, width: int) -> torch.Tensor:
    return torch.randn(batch, 16, height, width)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def layouts(frozen: FrozenModule) -> list[list[int]]:
    """What the weights of each convolution are packed for; nothing where they are plain."""
    function = frozen.__dict__["_program"]._function("forward")
    weights: list[list[int]] = function._packing.inputs()[0]
    return weights


@pytest.mark.parametrize("count", [1, 2])
def test_every_size_and_number_of_threads_is_right(
    packable: tuple[FrozenModule, FrozenModule], threads: Callable[[int], None], count: int
) -> None:
    threads(count)
    for sizes in (*SIZES, *(size for size in SIZES for _ in range(3))):
        x = image(*sizes)
        expected, given = (module(x) for module in packable)
        assert given.dtype == expected.dtype
        assert distance(given, expected) < 0.01


def test_weights_are_packed_anew_for_sizes_that_come_twice(
    packable: tuple[FrozenModule, FrozenModule], threads: Callable[[int], None]
) -> None:
    threads(1)
    packed = again(packable[1], "packed")
    assert layouts(packed) == [[1, 16, 12, 12], [1, 64, 12, 12]]
    packed(image(5, 12, 12))
    packed(image(1, 20, 9))
    packed(image(1, 12, 12))
    assert layouts(packed) == [[1, 16, 12, 12], [1, 64, 12, 12]], "one other size changes nothing"
    for _ in range(2):
        packed(image(2, 20, 9))
    assert layouts(packed) == [[2, 16, 20, 9], [2, 64, 20, 9]]
    for width in (10, 11):
        packed(image(1, 20, width))
    assert layouts(packed) == [[], []], "no size stays"
    for _ in range(2):
        packed(image(1, 20, 11))
    assert layouts(packed) == [[1, 16, 20, 11], [1, 64, 20, 11]]
    threads(2)
    assert layouts(packed) == [[], []]
    for _ in range(2):
        packed(image(1, 20, 11))
    assert layouts(packed) == [[1, 16, 20, 11], [1, 64, 20, 11]]


def test_weights_come_back_to_the_bit_from_any_layout(
    packable: tuple[FrozenModule, FrozenModule],
) -> None:
    native = again(packable[1], "native")
    expected = held_by(native)
    for sizes in ([(2, 20, 9)] * 2, [(1, 20, 10), (1, 20, 11)]):
        packed = again(native, "packed")
        for size in sizes:
            packed(image(*size))
        for before, after in zip(expected, held_by(packed), strict=True):
            assert torch.equal(before, after)
            assert before.stride() == after.stride()


def test_threads_that_call_with_their_own_sizes_do_not_disturb_each_other(
    packable: tuple[FrozenModule, FrozenModule],
) -> None:
    upcast_, packed = packable
    inputs = [image(*size) for size in SIZES for _ in range(5)]
    expected = [upcast_(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        given = list(pool.map(packed, inputs))
    for one, other in zip(given, expected, strict=True):
        assert distance(one, other) < 0.01


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 16, 16), nn.ReLU()), (1, 3, None, None)),
        (lambda: nn.Linear(300, 300), (None, 300)),
    ],
)
def test_sizes_that_vary_do_not_keep_layers_from_being_packed(
    model: Callable[[], nn.Module], shape: tuple[int | None, ...]
) -> None:
    torch.manual_seed(0)
    one, other = (torch.randn([size or free for size in shape]) for free in (48, 64))
    frozen = trace_and_freeze(
        model().eval(), (one,), check_inputs=[(other,)], compute="packed", verify=False
    )
    assert frozen.metadata.inputs[0].shape == shape
    kinds = {node.kind() for node in nodes_of(plan_graph(frozen))}
    assert kinds & {"mkldnn::_convolution_pointwise", "mkldnn::_linear_pointwise"}
    for x in (one, one, other, other):
        assert distance(frozen(x), again(frozen, "upcast")(x)) < 0.01


def test_nan_stays_nan(packable: tuple[FrozenModule, FrozenModule]) -> None:
    x = torch.randn(1, 16, 12, 12)
    x[0, 3, 5, 5] = float("nan")
    expected, given = (module(x).isnan() for module in packable)
    assert expected.any()
    assert torch.equal(given, expected)


def test_results_are_in_the_usual_order() -> None:
    model, inputs = make("conv3d")
    frozen = trace_and_freeze(model, inputs, compute="packed", verify=False)
    image, flat, _ = frozen(*inputs)
    assert image.is_contiguous()
    assert flat.is_contiguous()


def test_a_program_that_sees_the_order_of_memory_keeps_its_convolutions() -> None:
    class Strides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y.as_strided((2, 4), (4, 1))

    x = torch.randn(1, 3, 8, 8)
    native, packed = (
        trace_and_freeze(Strides().eval(), (x,), compute=compute, verify=False)
        for compute in ("native", "packed")
    )
    del native
    assert "aten::_convolution" in {node.kind() for node in nodes_of(plan_graph(packed))}
    packed(x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        return self.layer(x + torch.rand(256)), self.calls * 1


class Checked(Counter):
    """Refuses the zeros that loading passes, once its state has changed."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        inverse = torch.linalg.inv(x[:4, :4])
        return self.layer(x + inverse.sum() + torch.rand(256)), self.calls * 1


@pytest.mark.parametrize("make_model", [Counter, Checked])
def test_loading_leaves_a_program_and_the_generator_as_they_were(
    make_model: type[Counter], tmp_path: Any
) -> None:
    model, x = make_model().eval(), torch.rand(8, 256)
    native = trace_and_freeze(model, (x,), compute="native", verify=False)
    save(native, tmp_path / "model.pt")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    packed = load(tmp_path / "model.pt", compute="packed")
    assert torch.equal(torch.rand(1), expected)
    save(packed, tmp_path / "again.pt")
    fresh = trace_and_freeze(model, (x,), compute="packed", verify=False)
    for program in (packed, load(tmp_path / "again.pt", compute="packed"), fresh):
        for call in (1, 2):
            assert program(x)[1].item() == call


def test_loading_leaves_a_constant_that_the_program_writes_to(tmp_path: Any) -> None:
    class Writer(Counter):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            start = torch.tensor([1.0])
            start.add_(1)
            return self.layer(x + start), start * 1

    x = torch.rand(8, 256)
    native = trace_and_freeze(Writer().eval(), (x,), compute="native", verify=False)
    save(native, tmp_path / "model.pt")
    native, packed = (load(tmp_path / "model.pt", compute=each) for each in ("native", "packed"))
    assert torch.equal(native(x)[1], packed(x)[1])


def test_small_layers_and_single_rows_are_not_packed() -> None:
    torch.manual_seed(0)
    cases = {(8, 16): 16, (1, 512): 512}
    for sizes, width in cases.items():
        model = nn.Linear(width, 512 if width == 512 else 16).eval()
        frozen = trace_and_freeze(model, (torch.rand(sizes),), compute="packed", verify=False)
        assert "aten::linear" in {node.kind() for node in nodes_of(plan_graph(frozen))}


def test_modules_that_share_a_program_do_not_disturb_each_other() -> None:
    model, inputs = make("u-net")
    native = trace_and_freeze(model, inputs, compute="native", verify=False)
    expected = trace_and_freeze(model, inputs, compute="native", verify=False)(*inputs)
    first, second = again(native, "packed"), again(native, "upcast")
    assert torch.equal(native(*inputs), expected)
    packed, upcast_ = first(*inputs), second(*inputs)
    third = again(first, "native")
    assert torch.equal(third(*inputs), expected)
    assert torch.equal(first(*inputs), packed)
    assert torch.equal(second(*inputs), upcast_)


def test_packed_weights_come_back_to_the_bit() -> None:
    torch.manual_seed(0)
    model = Packable().eval().to(memory_format=torch.channels_last)
    x = torch.randn(1, 16, 12, 12)
    frozen = trace_and_freeze(model, (x,), compute="native", verify=False)
    expected = frozen(x)
    weights = [item for item in held_by(frozen) if item.dim() > 1]
    packed = again(frozen, "packed")
    packed(x)
    returned = [item for item in held_by(packed) if item.dim() > 1]
    assert len(weights) == len(returned) == 4
    for before, after in zip(weights, returned, strict=True):
        assert torch.equal(before, after)
        assert before.dtype == after.dtype
        assert before.stride() == after.stride()
    assert torch.equal(again(packed, "native")(x), expected)


def held_by(frozen: FrozenModule) -> list[torch.Tensor]:
    """The tensor constants of a module's storable program."""
    values = [
        node.output().toIValue()
        for node in nodes_of(frozen.graph)
        if node.kind() == "prim::Constant"
    ]
    return [value for value in values if isinstance(value, torch.Tensor)]


class TwoPaths(Packable):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 1 if torch.is_grad_enabled() else y


def test_a_program_that_asks_for_gradients_first_is_packed_for_both_answers() -> None:
    model, x = TwoPaths().eval(), image(1, 12, 12)
    frozen = trace_and_freeze(model, x, compute="native", verify=False)
    assert "aten::is_grad_enabled" in {node.kind() for node in nodes_of(frozen.graph)}
    packed, reference = again(frozen, "packed"), detached(model(x))
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            function = packed.__dict__["_program"]._function("forward")
            kinds = {node.kind() for node in nodes_of(function._function.graph)}
            assert "mkldnn::_convolution_pointwise" in kinds
            with torch.autocast("cpu", torch.bfloat16):
                eager = detached(model(x))
            for _ in range(3):
                assert distance(packed(x), reference) <= 1.05 * distance(eager, reference)
    other = image(1, 20, 20)
    for enabled in (True, False, True, False):
        with torch.set_grad_enabled(enabled):
            packed(other)
            assert distance(packed(other), again(frozen, "upcast")(other)) < 0.01
            assert layouts(packed) == [[1, 16, 20, 20], [1, 64, 20, 20]]


class Transposed(nn.Module):
    """Linear layers as GPT-2 writes them, one of them scaled and so no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(256, 300) / 16)
        self.last = nn.Parameter(torch.randn(300, 256) / 16)
        self.bias = nn.Parameter(torch.randn(300))
        self.rows = nn.Parameter(torch.randn(8, 256))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional.gelu(torch.addmm(self.bias, x, self.first))
        scaled = torch.addmm(self.bias, x, self.first, beta=0.5)
        return torch.addmm(self.rows, y, self.last), scaled


def test_products_that_are_linear_layers_are_packed() -> None:
    torch.manual_seed(0)
    model, x = Transposed().eval(), torch.randn(8, 256)
    frozen = trace_and_freeze(model, x, compute="native", verify=False)
    weights = held_by(frozen)
    packed = again(frozen, "packed")
    kinds = collections.Counter(node.kind() for node in nodes_of(plan_graph(packed)))
    assert (kinds["mkldnn::_linear_pointwise"], kinds["aten::addmm"]) == (1, 2)
    reference = detached(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        eager = detached(model(x))
    for _ in range(3):
        assert distance(packed(x), reference) <= 1.05 * distance(eager, reference)
    for before, after in zip(weights, held_by(packed), strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()


# --- in other processes ---------------------------------------------------------------------------

LSTM = """
import torch
import amp_script
torch.manual_seed(0)
class Tagger(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.LSTM(24, 32, num_layers=2, bidirectional=True)
    def forward(self, x):
        return self.layers(x)[0]
model, x = Tagger().eval(), torch.randn(5, 2, 24)
with torch.no_grad():
    reference = model(x)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        print("eager runs")
    except RuntimeError as error:
        print("eager fails")
frozen = amp_script.trace_and_freeze(model, (x,), dtype=torch.bfloat16)
result = frozen(x)
print(frozen.compute)
print(float((result.float() - reference).norm() / reference.norm()))
amp_script.save(frozen, "tagger.pt")
print(torch.equal(amp_script.load("tagger.pt")(x), result))
"""


def test_an_lstm_runs_where_eager_autocast_fails(tmp_path: Any) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LSTM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    eager, plan, difference, equal = done.stdout.splitlines()
    assert eager == "eager fails"
    assert plan == "packed"
    assert float(difference) < 0.01
    assert equal == "True"


@pytest.mark.parametrize("compute", ["native", "upcast", "packed"])
def test_many_tensors_that_may_be_scalars_are_joined(compute: Any) -> None:
    """Each may have dimensions or none; to go through all that this may be would take forever."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.layer(x).sum(0).unsqueeze(0).squeeze()
            return torch.stack([rows[index % 8] * 1.0 for index in range(60)])

    model, x = Joins().eval(), torch.randn(2, 8)
    frozen = trace_and_freeze(model, x, compute=compute, verify=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(x)
    assert frozen(x).dtype is expected.dtype
    assert frozen(x).shape == expected.shape
