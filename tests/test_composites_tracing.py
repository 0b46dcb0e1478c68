"""Composites in traces: taken apart in the state that the traced code is in at each call."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_script
from amp_script.jit_state import jit_autocast_pass, shield
from amp_script.lowering.composites import registry
from amp_script.lowering.composites.tracing import OTHER_NAMES, trace_composites

REGIONS = [torch.bfloat16, torch.float16]


def _traced(function: Callable[..., Any], *inputs: torch.Tensor, region: torch.dtype) -> Any:
    entered = torch.autocast("cpu", dtype=region, cache_enabled=False)
    with jit_autocast_pass(False), entered, trace_composites():
        return torch.jit.trace(function, inputs, check_trace=False)


def _assert_equal(
    function: Callable[..., Any], traced: Any, region: torch.dtype, *inputs: Any
) -> None:
    with torch.no_grad(), jit_autocast_pass(False):
        with torch.autocast("cpu", dtype=region, cache_enabled=False):
            want = function(*inputs)
        for _ in range(3):
            with shield():
                got = traced(*inputs)
            for one, other in zip(_parts(got), _parts(want), strict=True):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)


def _parts(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.tensordot(x, x, 1),
        lambda x: x.inner(x),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.einsum("ij,kj,lj->ikl", x, x, x),
        lambda x: torch.cov(x),
        lambda x: x.corrcoef(),
        lambda x: torch.linalg.multi_dot([x, x, x, x]),
        lambda x: torch.linalg.matrix_power(x, 5),
        lambda x: torch.linalg.pinv(x),
        lambda x: torch.linalg.pinv(x + x.T, hermitian=True),
        lambda x: torch.ops.aten.tensordot(x, x, [0], [1]),
        lambda x: nn.functional.bilinear(x, x, x.expand(4, 3, 3)),
        lambda x: nn.functional.pad(x.bfloat16()[None], (1, 1), "reflect"),
        lambda x: torch.ops.aten.affine_grid_generator(x[None, :2], [1, 1, 2, 3], True),
        lambda x: torch.ops.aten.nll_loss_nd(x.bfloat16(), x.argmax(1), None, 1, -100),
    ],
)
def test_a_trace_equals_eager_autocast(call: Callable[..., Any], region: torch.dtype) -> None:
    x = torch.rand(3, 3)
    _assert_equal(call, _traced(call, x, region=region), region, x)


@pytest.mark.parametrize("region", REGIONS)
def test_each_call_is_in_the_state_of_its_place(region: torch.dtype) -> None:
    other = REGIONS[1 - REGIONS.index(region)]

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.tensordot(x, x, 1)
        with torch.autocast("cpu", enabled=False):
            b = torch.tensordot(x, x, 1)
            with amp_script.autocast("cpu", dtype=other):
                c = torch.tensordot(x, x, 1)
            d = x @ x + torch.tensordot(x, x, 1)
        e = torch.tensordot(x, x, 1)
        torch.set_autocast_enabled("cpu", False)
        f = torch.tensordot(x, x, 1)
        torch.set_autocast_enabled("cpu", True)
        return a, b, c, d, e, f, torch.tensordot(x, x, 1)

    x = torch.rand(4, 4)
    traced = _traced(program, x, region=region)
    _assert_equal(program, traced, region, x)
    _assert_equal(program, traced, region, torch.rand(4, 4))


def test_nothing_is_held_fast() -> None:
    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.linalg.multi_dot([x, y, y.T, x.T]) + torch.cov(x).sum()

    traced = _traced(chain, torch.rand(2, 5), torch.rand(5, 1), region=torch.bfloat16)
    for rows, columns, inner in ((2, 5, 1), (5, 2, 9), (3, 7, 4)):
        x, y = torch.rand(rows, columns), torch.rand(columns, inner)
        _assert_equal(chain, traced, torch.bfloat16, x, y)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bij,bjk->bik", x, y)

    traced = _traced(product, torch.rand(2, 3, 4), torch.rand(2, 4, 5), region=torch.bfloat16)
    for shape in ((1, 2, 3), (3, 1, 2), (2, 2, 1)):
        batch, rows, inner = shape
        x, y = torch.rand(shape), torch.rand(batch, inner, 4)
        _assert_equal(product, traced, torch.bfloat16, x, y)


def test_outside_every_region_the_operator_stays() -> None:
    with trace_composites():
        traced = torch.jit.trace(lambda x: torch.tensordot(x, x, 1), torch.rand(3, 3))
    assert "aten::tensordot" in {node.kind() for node in traced.graph.nodes()}
    assert not any(node.hasAttribute("autocast") for node in traced.graph.nodes())


def test_the_profile_function_is_put_back_also_after_an_error() -> None:
    events = []

    def profiler(frame: Any, event: str, argument: object) -> None:
        events.append(event)

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        with pytest.raises(ValueError, match="on purpose"), trace_composites():
            raise ValueError("on purpose")
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert events


# --- models, through trace_and_freeze -------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 6, 2, **options)
        self.out = nn.Linear(6 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.rnn(x)[0]
        return self.out(states)


def _native_kernels(region: torch.dtype) -> bool:
    ops = torch.ops.mkldnn
    supported = ops._is_mkldnn_bf16_supported, ops._is_mkldnn_fp16_supported
    return bool(supported[REGIONS.index(region)]())


def _assert_frozen_equals(model: nn.Module, region: torch.dtype, *examples: torch.Tensor) -> None:
    frozen = amp_script.trace_and_freeze(
        model, (examples[0],), dtype=region, compute="native", fold_batch_norm=False
    )
    for example in examples:
        _assert_equal(model, frozen, region, example)


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
def test_recurrent_layers(kind: type[nn.RNNBase], bidirectional: bool, region: torch.dtype) -> None:
    if kind is nn.LSTM and not _native_kernels(region):
        pytest.skip("this processor has no LSTM kernels for the dtype, and eager mode raises")
    model = Tagger(kind, bidirectional=bidirectional, batch_first=True).eval()
    _assert_frozen_equals(model, region, torch.rand(2, 5, 4), torch.rand(1, 3, 4))


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(norm_first: bool, region: torch.dtype) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, norm_first=norm_first, batch_first=True).eval()
    _assert_frozen_equals(layer, region, torch.rand(2, 5, 8), torch.rand(1, 3, 8))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return attended


@pytest.mark.parametrize("region", REGIONS)
def test_multihead_attention(region: torch.dtype) -> None:
    _assert_frozen_equals(SelfAttention().eval(), region, torch.rand(2, 5, 8))


class Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.linear.bias, self.linear(x), self.linear.weight)


@pytest.mark.parametrize("region", REGIONS)
def test_the_executor_does_not_split_addmm(region: torch.dtype) -> None:
    _assert_frozen_equals(Affine().eval(), region, torch.randn(8, 16), torch.randn(3, 16))


def test_a_frozen_program_holds_no_composite_that_autocast_reaches() -> None:
    model = Tagger(nn.GRU).eval()
    frozen = amp_script.trace_and_freeze(model, (torch.rand(5, 2, 4),), dtype=torch.bfloat16)
    kinds = {node.kind() for node in registry.nodes_of(frozen.graph)}
    assert "aten::gru" not in kinds


@pytest.mark.parametrize("name", sorted(OTHER_NAMES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_under_another_name(name: str, dtype: torch.dtype) -> None:
    operator: Any = getattr(torch.ops.aten, name.removeprefix("aten::"))
    (schema, *_) = (getattr(operator, each)._schema for each in operator.overloads())

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = {"Tensor": x, "int": -1, "List[int]": [-1]}
            values = [given.get(str(each.type), x) for each in schema.arguments]
            values = [
                value
                for value, each in zip(values, schema.arguments, strict=True)
                if not each.has_default_value()
            ]
            return self.run(*values)

        def run(self, *values: Any) -> torch.Tensor:
            first: torch.Tensor = operator(*values)
            with torch.autocast("cpu", enabled=False):
                second = operator(*values)
            return first.float() + second.float() + first

    x = (torch.linspace(-1, 1, 36).reshape(4, 3, 3) / 2).to(dtype)
    model = Block().eval()
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    _assert_equal(model, frozen, torch.bfloat16, x)
