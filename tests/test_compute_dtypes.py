"""What compute plans know of operators against what the installed torch does.

Every operator in their tables is called on tensors of several dtypes, with and without dimensions,
and what is said of each value of the program is compared with the value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, product
from typing import Any, TypeAlias

import opdb
import report_truth
import torch
from torch import nn

from amp_script import trace_and_freeze
from amp_script.compute import Kind
from amp_script.compute.dtypes import infer, input_name
from amp_script.compute.operators import AGREEING, ALIKE, KEEP_DTYPE, KINDS, PROMOTE
from amp_script.compute.upcast import REDUCED, upcast
from amp_script.lowering._graph import nodes_of

F32, BF, F16 = torch.float32, torch.bfloat16, torch.float16
TABLES = KINDS.keys() | ALIKE | KEEP_DTYPE | PROMOTE

Tensors: TypeAlias = "tuple[torch.Tensor, ...]"


def mixed(tensors: Sequence[torch.Tensor]) -> Iterator[Tensors]:
    """The tensors with their float32 ones in several dtypes, some of them without dimensions."""
    places = [place for place, tensor in enumerate(tensors) if tensor.dtype is F32]
    patterns = [(BF,), (F32, BF), (BF, F32), (F16, BF)]
    dtypes = dict.fromkeys(tuple(islice(cycle(each), len(places))) for each in patterns)
    scalars = dict.fromkeys([(), *((place,) for place in places), tuple(places)])
    for chosen, flat in product(dtypes, scalars):
        dtype_of = dict(zip(places, chosen, strict=True))
        yield tuple(
            _scalar(tensor.to(dtype_of.get(place, tensor.dtype)), place in flat)
            for place, tensor in enumerate(tensors)
        )


def _scalar(tensor: torch.Tensor, is_wanted: bool) -> torch.Tensor:
    can_be = tensor.layout is torch.strided and tensor.numel() > 0
    return tensor.flatten()[0].clone() if is_wanted and can_be else tensor.clone()


def traced(module: nn.Module, tensors: Tensors) -> Any:
    """A trace, or None where torch refuses the tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trace of one call is all that is wanted here
        try:
            return torch.jit.trace(module, tensors, check_trace=False, strict=False)
        except (AssertionError, IndexError, NotImplementedError, RuntimeError, ValueError):
            return None


class Call(nn.Module):
    def __init__(self, call: opdb.Program) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors: torch.Tensor) -> object:
        return self.call(*tensors)


class OnCopy(Call):
    """Calls what changes its first argument."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> object:
        return self.call(x.clone(), *others)


ELSEWHERE: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "alias": ("torch.ops.aten.alias(t0)", [(2, 3)]),
    "copy": ("torch.ops.aten.copy(t0, t1)", [(2, 3), (2, 3)]),
    "fill": ("torch.ops.aten.fill(t0, t1)", [(2, 3), ()]),
    "zero": ("torch.ops.aten.zero(t0)", [(2, 3)]),
    "lift_fresh": ("torch.ops.aten.lift_fresh(t0)", [(2, 3)]),
    "numpy_T": ("t0.T", [(2, 3)]),
    "reflection_pad1d": ("torch.ops.aten.reflection_pad1d(t0, [1, 1])", [(2, 3)]),
    "reflection_pad2d": ("torch.ops.aten.reflection_pad2d(t0, [1, 1, 1, 1])", [(2, 3, 3)]),
    "replication_pad1d": ("torch.ops.aten.replication_pad1d(t0, [1, 1])", [(2, 3)]),
    "replication_pad2d": ("torch.ops.aten.replication_pad2d(t0, [1, 1, 1, 1])", [(2, 3, 3)]),
    "max_pool1d": ("torch.max_pool1d(t0, [2])", [(2, 3, 4)]),
    "max_pool2d": ("torch.max_pool2d(t0, [2, 2])", [(2, 3, 4, 4)]),
    "max_pool3d": ("torch.max_pool3d(t0, [2, 2, 2])", [(2, 3, 4, 4, 4)]),
    "upsample_nearest2d": ("torch.ops.aten.upsample_nearest2d(t0, [4, 4])", [(1, 2, 2, 2)]),
    "upsample_nearest3d": ("torch.ops.aten.upsample_nearest3d(t0, [4, 4, 4])", [(1, 2, 2, 2, 2)]),
    "chain_matmul": ("torch.ops.aten.chain_matmul([t0, t1])", [(2, 3), (3, 4)]),
    "_addmm_activation": ("torch.ops.aten._addmm_activation(t0, t1, t2)", [(4,), (2, 3), (3, 4)]),
    "conv1d": ("torch.conv1d(t0, t1)", [(2, 3, 8), (4, 3, 2)]),
    "conv2d": ("torch.conv2d(t0, t1)", [(2, 3, 8, 8), (4, 3, 2, 2)]),
    "conv3d": ("torch.conv3d(t0, t1)", [(2, 3, 8, 8, 8), (4, 3, 2, 2, 2)]),
    "conv_tbc": ("torch.conv_tbc(t0, t1, t2)", [(8, 2, 3), (2, 3, 4), (4,)]),
    "conv_transpose1d": ("torch.conv_transpose1d(t0, t1)", [(2, 3, 8), (3, 4, 2)]),
    "conv_transpose2d": ("torch.conv_transpose2d(t0, t1)", [(2, 3, 8, 8), (3, 4, 2, 2)]),
    "conv_transpose3d": ("torch.conv_transpose3d(t0, t1)", [(2, 3, 8, 8, 8), (3, 4, 2, 2, 2)]),
    "convolution": (
        "torch.ops.aten.convolution(t0, t1, None, [1], [0], [1], False, [0], 1)",
        [(2, 3, 8), (4, 3, 2)],
    ),
    "mkldnn_convolution": (
        "torch.ops.aten.mkldnn_convolution(t0, t1, None, [0, 0], [1, 1], [1, 1], 1)",
        [(2, 3, 8, 8), (4, 3, 2, 2)],
    ),
    "_native_multi_head_attention": (
        "torch.ops.aten._native_multi_head_attention(t0, t0, t0, 8, 2, t1, t2, t3, t4)",
        [(2, 3, 8), (24, 8), (24,), (8, 8), (8,)],
    ),
    "_transformer_encoder_layer_fwd": (
        "torch.ops.aten._transformer_encoder_layer_fwd("
        "t0, 8, 2, t1, t2, t3, t4, False, False, 1e-5, t4, t4, t4, t4, t3, t4, t3, t4)",
        [(2, 3, 8), (24, 8), (24,), (8, 8), (8,)],
    ),
    "lstm_cell": (
        "torch.lstm_cell(t0, [t1, t1], t2, t3)",
        [(2, 3), (2, 4), (16, 3), (16, 4)],
    ),
    "gru_cell": ("torch.gru_cell(t0, t1, t2, t3)", [(2, 3), (2, 4), (12, 3), (12, 4)]),
    "rnn_tanh_cell": ("torch.rnn_tanh_cell(t0, t1, t2, t3)", [(2, 3), (2, 4), (4, 3), (4, 4)]),
    "rnn_relu_cell": ("torch.rnn_relu_cell(t0, t1, t2, t3)", [(2, 3), (2, 4), (4, 3), (4, 4)]),
    "lstm": (
        "torch.lstm(t0, [t1, t1], [t2, t3], False, 1, 0.0, False, False, False)",
        [(5, 2, 3), (1, 2, 4), (16, 3), (16, 4)],
    ),
    "gru": (
        "torch.gru(t0, t1, [t2, t3], False, 1, 0.0, False, False, False)",
        [(5, 2, 3), (1, 2, 4), (12, 3), (12, 4)],
    ),
    "rnn_tanh": (
        "torch.rnn_tanh(t0, t1, [t2, t3], False, 1, 0.0, False, False, False)",
        [(5, 2, 3), (1, 2, 4), (4, 3), (4, 4)],
    ),
    "rnn_relu": (
        "torch.rnn_relu(t0, t1, [t2, t3], False, 1, 0.0, False, False, False)",
        [(5, 2, 3), (1, 2, 4), (4, 3), (4, 4)],
    ),
}
"""Calls of operators that the database has not, or that a trace has under another name."""


def samples() -> Iterator[opdb.Sample]:
    """Calls of the operators in the tables, and of others that take the same."""
    for case in opdb.cases(F32, samples=1, form="call"):
        yield from case.samples
    for expression, shapes in ELSEWHERE.values():
        tensors = tuple(torch.randn(shape) for shape in shapes)
        sample = opdb.Sample(len, tensors, expression)
        yield opdb.Sample(opdb.scripted(sample.program()), tensors, expression)


def test_the_tables_say_what_torch_does() -> None:
    wrong, reached = [], set()
    for sample in samples():
        plain = traced(Call(sample.call), sample.inputs())
        if plain is None or not kinds_in(plain) & TABLES:
            continue
        for tensors in mixed(sample.tensors):
            program = traced(Call(sample.call), tensors)
            if program is not None:
                found = report_truth.compare(program._c, tensors)
                wrong += found.wrong
                reached |= found.kinds
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    # One result of this one is undefined where nothing is trained, and cannot be compared.
    assert sorted(TABLES - reached) == ["aten::mkldnn_rnn_layer"]


def test_one_known_dtype_tells_no_more_than_torch_does() -> None:
    wrong, told = [], set()
    for sample in samples():
        plain = traced(Call(sample.call), sample.inputs())
        if plain is None or not kinds_in(plain) & KINDS.keys():
            continue
        for tensors in mixed(sample.tensors):
            program = traced(Call(sample.call), tensors)
            result = opdb.attempt(program, *tensors) if program is not None else None
            if not isinstance(result, torch.Tensor):
                continue
            graph = program.inlined_graph.copy()
            for value, tensor in zip(list(graph.inputs())[1:], tensors, strict=True):
                found = infer(graph, {input_name(value): tensor.dtype}).of(next(graph.outputs()))
                told |= kinds_in(program) if found is not None else set()
                if found not in (None, result.dtype):
                    dtypes = [each.dtype for each in tensors]
                    wrong.append(f"{sample.expression} of {dtypes}: {found}, not {result.dtype}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    assert AGREEING.keys() & told >= {"aten::linear", "aten::_convolution", "aten::bmm"}


def test_products_that_promote_keep_their_dtypes_and_casts() -> None:
    x = torch.rand(4, 4)
    calls: list[Any] = [
        lambda x: torch.outer(torch.cumprod(x, 0)[0], x.to(BF)[1]),
        lambda x: torch.addr(torch.cumprod(x, 0), x.to(BF)[0], x.to(BF)[1]),
        lambda x: torch.inner(torch.cumprod(x, 0), x.to(BF)[0, 0]),
        lambda x: torch.outer(torch.cumprod(x, 0)[0], x.to(BF)[1]).to(BF),
        lambda x: torch.outer(torch.cumprod(x.double(), 0)[0], x[1]).float(),
    ]
    for call in calls:
        with torch.autocast("cpu", BF):
            expected = call(x)
        for compute in ("native", "upcast", "packed"):
            model = Call(call).eval()
            frozen = trace_and_freeze(model, (x,), compute=compute, verify=False)
            assert not opdb.difference(expected, frozen(x)), compute


def kinds_in(program: Any) -> set[str]:
    graph = program.inlined_graph  # which has to outlive its nodes
    return {node.kind() for node in nodes_of(graph)}


# --- in-place operators ---------------------------------------------------------------------------


def test_a_plan_leaves_in_place_operators_their_dtypes() -> None:
    count = 0
    for case in opdb.cases(F32, samples=1, form="in place"):
        for sample in case.samples:
            for tensors in mixed(sample.tensors):
                program = traced(OnCopy(sample.call), tensors)
                if program is None:
                    continue
                graph = program.inlined_graph.copy()
                dtypes = {
                    input_name(value): tensor.dtype
                    for value, tensor in zip(list(graph.inputs())[1:], tensors, strict=True)
                }
                upcast(graph, dtypes, dict.fromkeys(REDUCED, frozenset(Kind)))
                function: Any = torch._C._create_function_from_graph("planned", graph)
                expected = opdb.attempt(program, *tensors)
                given = opdb.attempt(function, program._c, *tensors)
                assert isinstance(expected, torch.Tensor)
                assert isinstance(given, torch.Tensor)
                assert given.dtype == expected.dtype, f"{case.name}: {graph}"
                if f"aten::{case.operator}" not in KINDS:
                    assert not opdb.difference(expected, given), f"{case.name}: {graph}"
                count += 1
    assert count > 1000
