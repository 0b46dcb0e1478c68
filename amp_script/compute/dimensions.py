"""Whether a tensor surely has dimensions, which decides what dtypes promote to.

A tensor without dimensions does not widen one that has some: bfloat16 and a float32 scalar tensor
make bfloat16, bfloat16 and a float32 matrix float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Final, NamedTuple, TypeAlias

import torch

from amp_script.lowering._graph import (
    Block,
    Graph,
    Node,
    Value,
    constant,
    is_constant,
    is_tensor,
    is_tensor_list,
    nodes_of,
    parsed_schema,
)

from .operators import KEEP_DTYPE, PROMOTE, aten

__all__ = ["Dimensions", "is_in_place", "promoted"]

_ALWAYS: Final = aten(
    "conv1d conv2d conv3d _convolution convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d mm addmm bmm baddbmm addbmm mv addmv outer addr layer_norm batch_norm "
    "group_norm instance_norm rms_norm scaled_dot_product_attention cat stack flatten "
    "arange slice narrow unfold max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d pixel_shuffle upsample_nearest2d "
    "upsample_bilinear2d one_hot nonzero masked_select lstm gru"
)
"""Operators whose tensors have dimensions, whatever they are given, or raise."""

_CHANGES: Final = aten(
    "index mean sum amax amin squeeze view reshape unflatten unbind chunk split "
    "split_with_sizes tensor_split diagonal expand broadcast_to view_as reshape_as expand_as "
    "take_along_dim ravel repeat repeat_interleave pad constant_pad_nd index_select gather "
    "masked_scatter"
)
"""Operators whose result may have fewer dimensions than their first argument, or more."""

_MORE: Final[Mapping[str, tuple[int, int]]] = {
    "aten::embedding": (1, 1),
    "aten::select": (0, -1),
    "aten::unsqueeze": (0, 1),
}
"""Operators whose result has as many dimensions as one of their arguments, and more or fewer."""

_REDUCTIONS: Final = aten("mean sum prod amax amin max min median std var")
"""Operators whose result has no dimensions where they are not told which to reduce."""

_PAIRED: Final = aten("max min")
"""Reductions that have a form for two tensors, which reduces nothing."""

_BROADCAST: Final = PROMOTE | aten(
    "masked_fill lerp eq ne lt le gt ge __and__ __or__ logical_and logical_or"
)
"""Operators whose result has as many dimensions as the argument with the most."""

_AS_FIRST: Final = (
    (KEEP_DTYPE | aten("to type_as logical_not")) - _ALWAYS - _CHANGES - _MORE.keys() - _BROADCAST
)
"""Operators whose result has as many dimensions as their first argument."""

_RESHAPING: Final = aten(
    "resize_ resize_as_ set_ as_strided_ squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_"
)
"""Operators that give a tensor other dimensions in place."""


class _Rank(NamedTuple):
    """How many dimensions a tensor has: no fewer than, and no more than where that is known."""

    low: int
    high: int | None

    def plus(self, more: int) -> _Rank:
        return _Rank(max(self.low + more, 0), None if self.high is None else self.high + more)


_ANY: Final = _Rank(0, None)
_SOME: Final = _Rank(1, None)


class Dimensions:
    """Tells which tensors of a graph have dimensions.

    Args:
        graph: the graph, with its calls inlined.
        known: by the number of a value how many dimensions it has.
    """

    def __init__(self, graph: Graph, known: Mapping[int, int]) -> None:
        self._ranks: dict[int, _Rank] = {}
        if not any(map(_may_reshape, nodes_of(graph))):
            self._ranks |= {key: _Rank(rank, rank) for key, rank in known.items()}
            self._read(graph.block())

    def has(self, value: Value) -> bool | None:
        """Whether a tensor has dimensions; None where the program does not tell."""
        rank = self._rank(value)
        return True if rank.low > 0 else False if rank.high == 0 else None

    def _rank(self, value: Value) -> _Rank:
        return self._ranks.get(value.unique(), _ANY)

    def _read(self, block: Block) -> None:
        for node in block.nodes():
            for inner in node.blocks():
                self._read(inner)
            for value in node.outputs():
                self._ranks.setdefault(value.unique(), self._find(node, value))

    def _find(self, node: Node, value: Value) -> _Rank:
        kind = node.kind()
        if kind == "prim::Constant":
            return _of_constant(value)
        if kind == "prim::If":
            return _either([self._rank(end) for end in _ends(node, value.offset())])
        if kind == "aten::linear":
            return self._of_linear(*list(node.inputs())[:2])
        if kind == "aten::matmul":
            ranks = [self._rank(each).low for each in node.inputs()]
            return _SOME if max(ranks) > 1 else _ANY  # of two vectors it is a scalar
        if kind in ("aten::view", "aten::reshape"):
            return _of_sizes(node.inputsAt(1))
        if kind in _MORE:
            position, more = _MORE[kind]
            return self._rank(node.inputsAt(position)).plus(more)
        if kind in _ALWAYS:
            return _SOME
        tensors = [each for each in node.inputs() if is_tensor(each)]
        if kind in _BROADCAST or (kind in _PAIRED and len(tensors) > 1):
            return _highest([self._rank(each) for each in tensors])
        if kind in _REDUCTIONS and "dim" not in node.schema():
            return _Rank(0, 0)
        if kind in _AS_FIRST or is_in_place(node):
            return self._rank(node.inputsAt(0))
        return _ANY

    def _of_linear(self, x: Value, weight: Value) -> _Rank:
        """A matrix leaves the input's dimensions; a vector takes the last of them."""
        if self._rank(weight).low < 2:
            return _ANY
        return self._rank(x)._replace(low=max(self._rank(x).low, 1))


def is_in_place(node: Node) -> bool:
    """Whether a node writes to its first argument, a tensor, and returns it."""
    return (
        node.kind().endswith("_")
        and "!" in node.schema()
        and node.inputsSize() > 0
        and is_tensor(node.inputsAt(0))
    )


def _may_reshape(node: Node) -> bool:
    """Whether a node may give a tensor that there is already other dimensions."""
    if node.kind() in _RESHAPING:
        return True
    schema = parsed_schema(node.schema()) if "!" in node.schema() else None
    # What is named to write to, such as ``out``, is resized.
    named = [each.alias_info for each in (schema.arguments if schema else ()) if each.kwarg_only]
    return any(info is not None and info.is_write for info in named)


def _of_constant(value: Value) -> _Rank:
    held = constant(value)
    return _Rank(held.dim(), held.dim()) if isinstance(held, torch.Tensor) else _ANY


def _highest(ranks: Sequence[_Rank]) -> _Rank:
    highs = [rank.high for rank in ranks if rank.high is not None]
    known = len(highs) == len(ranks)
    low = max((rank.low for rank in ranks), default=0)
    return _Rank(low, max(highs, default=None) if known else None)


def _either(ranks: Sequence[_Rank]) -> _Rank:
    return _highest(ranks)._replace(low=min(rank.low for rank in ranks))


def _ends(node: Node, offset: int) -> list[Value]:
    """What the branches give for one result."""
    return [list(block.outputs())[offset] for block in node.blocks()]


def _of_sizes(sizes: Value) -> _Rank:
    """The rank that a list of sizes has."""
    node = sizes.node()
    if is_constant(sizes) and isinstance(constant(sizes), list):
        count = len(constant(sizes))
    elif node.kind() == "prim::ListConstruct":
        count = node.inputsSize()
    else:
        return _ANY
    return _Rank(count, count)


def promoted(
    node: Node, dtype_of: Callable[[Value], torch.dtype | None], dimensions: Dimensions
) -> torch.dtype | None:
    """What the tensors of an operator in :data:`PROMOTE` promote to, floating ones among them.

    The rules are those of the installed torch, which is asked once for each mix that is possible.

    Returns:
        None where a dtype is not known, and where it depends on dimensions that are not.
    """
    taken = _promoting(node)
    if taken is None:
        return None
    dtypes = [dtype for value in taken if (dtype := dtype_of(value)) is not None]
    if len(dtypes) < len(taken) or not any(dtype.is_floating_point for dtype in dtypes):
        return None  # a quotient of integers is of another dtype
    # Sets of what may come together, because a list may hold any number of tensors alike.
    mixes: set[_Mix] = {frozenset()}
    for value, dtype in zip(taken, dtypes, strict=True):
        choices = _choices(dimensions.has(value))
        mixes = {mix | {(dtype, has)} for mix in mixes for has in choices}
    found = set(map(_promote, mixes))
    return found.pop() if len(found) == 1 else None


_Mix: TypeAlias = "frozenset[tuple[torch.dtype, bool]]"
"""Dtypes that are promoted together, each with whether its tensors have dimensions."""


def _promoting(node: Node) -> list[Value] | None:
    """The tensors that an operator promotes; None where a run alone tells which they are."""
    values = list(node.inputs())
    if node.kind() == "aten::where":
        del values[0]  # the condition
    if any(value.type().kind() in _UNCERTAIN for value in values):
        return None
    if values and is_tensor_list(values[0]):
        made = values[0].node()
        return list(made.inputs()) if made.kind() == "prim::ListConstruct" else values[:1]
    return [value for value in values if is_tensor(value) and not _is_number(value)]


_UNCERTAIN: Final = frozenset({"ComplexType", "NumberType", "OptionalType"})
"""Types of what may be complex, and of what may be no tensor."""


def _is_number(value: Value) -> bool:
    """Whether a tensor is one that torch made of a number, which promotes as the number does."""
    return is_constant(value) and not isinstance(constant(value), torch.Tensor)


def _choices(has_dimensions: bool | None) -> tuple[bool, ...]:
    return (False, True) if has_dimensions is None else (has_dimensions,)


def _promote(mix: _Mix) -> torch.dtype:
    """What tensors promote to, of which some have dimensions."""
    groups: dict[bool, list[torch.dtype]] = {}
    for dtype, has in mix:
        groups.setdefault(has, []).append(dtype)
    examples = [
        torch.empty([1] * has, dtype=reduce(torch.promote_types, group), device="meta")
        for has, group in groups.items()
    ]
    return torch.result_type(examples[0], examples[-1])
