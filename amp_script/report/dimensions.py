"""Whether a tensor surely has dimensions, which decides what two dtypes promote to.

A tensor without dimensions does not widen one that has some: bfloat16 and a float32 scalar tensor
make bfloat16, bfloat16 and a float32 matrix float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

import torch

from amp_script.compute.operators import KEEP_DTYPE, PROMOTE
from amp_script.lowering._graph import Node, Value, constant, is_constant

__all__ = ["Dimensions", "promoted"]


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


_ALWAYS: Final = _aten(
    "conv1d conv2d conv3d _convolution convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d mm addmm bmm baddbmm addbmm mv addmv outer addr layer_norm batch_norm "
    "group_norm instance_norm rms_norm scaled_dot_product_attention cat concat stack flatten "
    "arange slice narrow unfold max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d pixel_shuffle upsample_nearest2d "
    "upsample_bilinear2d one_hot nonzero masked_select lstm gru"
)
"""Operators whose tensors have dimensions, whatever they are given, or raise."""

_CHANGES: Final = _aten(
    "index mean sum amax amin select squeeze view reshape unflatten unbind chunk split "
    "split_with_sizes tensor_split diagonal expand broadcast_to view_as reshape_as expand_as "
    "take_along_dim embedding ravel repeat repeat_interleave pad constant_pad_nd index_select "
    "gather"
)
"""Operators whose result may have fewer dimensions than their first argument, or more."""

_AS_FIRST: Final = (KEEP_DTYPE | _aten("to type_as masked_fill logical_not")) - _CHANGES - _ALWAYS
"""Operators whose result has as many dimensions as their first argument."""

_MORE: Final[Mapping[str, tuple[int, int]]] = {
    "aten::linear": (0, 0),
    "aten::embedding": (1, 1),
    "aten::unsqueeze": (0, 1),
}
"""Operators whose result has as many dimensions as one of their arguments, and more."""

_REDUCTIONS: Final = _aten("mean sum prod amax amin max min median std var")
"""Operators whose result has no dimensions where they are not told which to reduce."""

_BROADCAST: Final = PROMOTE | _aten("eq ne lt le gt ge __and__ __or__ logical_and logical_or")
"""Operators whose result has as many dimensions as the argument with the most."""


class _Rank(NamedTuple):
    """How many dimensions a tensor has: no fewer than, and no more than where that is known."""

    low: int
    high: int | None

    def plus(self, more: int) -> _Rank:
        return _Rank(self.low + more, None if self.high is None else self.high + more)


_ANY: Final = _Rank(0, None)
_SOME: Final = _Rank(1, None)


class Dimensions:
    """Tells which tensors have dimensions.

    Args:
        known: by the number of a value how many dimensions it has.
    """

    def __init__(self, known: Mapping[int, int]) -> None:
        self._ranks = {key: _Rank(rank, rank) for key, rank in known.items()}

    def has(self, value: Value) -> bool | None:
        """Whether a tensor has dimensions; None where the program does not tell."""
        rank = self._rank(value)
        return True if rank.low > 0 else False if rank.high == 0 else None

    def _rank(self, value: Value) -> _Rank:
        key = value.unique()
        if key not in self._ranks:
            self._ranks[key] = _ANY  # what leads back to itself does not tell
            self._ranks[key] = self._find(value)
        return self._ranks[key]

    def _find(self, value: Value) -> _Rank:
        node = value.node()
        kind = node.kind()
        if kind == "prim::Constant":
            held = constant(value)
            return _Rank(held.dim(), held.dim()) if isinstance(held, torch.Tensor) else _ANY
        if kind in _MORE:
            position, more = _MORE[kind]
            return self._rank(node.inputsAt(position)).plus(more)
        if kind == "aten::matmul":
            ranks = [self._rank(each).low for each in node.inputs()]
            return _SOME if max(ranks) > 1 else _ANY  # of two vectors it is a scalar
        if kind in _ALWAYS:
            return _SOME
        if kind in _REDUCTIONS and "dim" not in node.schema():
            return _Rank(0, 0)
        if kind in ("aten::view", "aten::reshape"):
            return _of_sizes(node.inputsAt(1))
        if kind in _AS_FIRST:
            return self._rank(node.inputsAt(0))
        if kind in _BROADCAST:
            return _highest([self._rank(each) for each in node.inputs() if _is_tensor(each)])
        if kind == "prim::If":
            return _either([self._rank(end) for end in _ends(node, value.offset())])
        return _ANY


def _highest(ranks: Sequence[_Rank]) -> _Rank:
    highs = [rank.high for rank in ranks if rank.high is not None]
    known = len(highs) == len(ranks)
    return _Rank(max(rank.low for rank in ranks), max(highs) if known else None)


def _either(ranks: Sequence[_Rank]) -> _Rank:
    return _highest(ranks)._replace(low=min(rank.low for rank in ranks))


def _ends(node: Node, offset: int) -> list[Value]:
    """What the branches give for one result."""
    return [list(block.outputs())[offset] for block in node.blocks()]


def _of_sizes(sizes: Value) -> _Rank:
    """The rank that a list of sizes has."""
    node = sizes.node()
    if is_constant(sizes):
        count = len(constant(sizes))
    elif node.kind() == "prim::ListConstruct":
        count = node.inputsSize()
    else:
        return _ANY
    return _Rank(count, count)


def _is_tensor(value: Value) -> bool:
    return bool(value.type().kind() == "TensorType")


def promoted(
    node: Node, dtype_of: Callable[[Value], torch.dtype | None], dimensions: Dimensions
) -> torch.dtype | None:
    """What an operator's tensors promote to, by the rules of the installed torch.

    Returns:
        None for an operator that does not promote, where a dtype is not known, and where it depends
        on dimensions that are not.
    """
    if node.kind() in _LISTS:
        parts = node.inputsAt(0).node()
        found = [dtype_of(value) for value in parts.inputs()]
        if parts.kind() != "prim::ListConstruct" or not found or None in found:
            return None
        return _promote_all([dtype for dtype in found if dtype is not None])
    if node.kind() not in _PAIRS:
        return None
    values = [value for value in node.inputs() if _is_tensor(value)][-2:]
    pair = [(dtype_of(value), dimensions.has(value)) for value in values]
    return _promote_pair(pair) if len(pair) == 2 else None


_PAIRS: Final = _aten("add sub rsub mul div maximum minimum where atan2 fmod remainder pow")
"""Operators whose result has the dtype to which their last two tensors promote."""

_LISTS: Final = _aten("cat concat stack")
"""Operators whose result has the dtype to which tensors of a list promote, alike in dimensions."""


def _promote_all(dtypes: list[torch.dtype]) -> torch.dtype:
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def _promote_pair(pair: list[tuple[torch.dtype | None, bool | None]]) -> torch.dtype | None:
    """Ask torch, once for each number of dimensions that is possible."""
    if not any(dtype is not None and dtype.is_floating_point for dtype, _ in pair):
        return None  # a quotient of integers is of another dtype
    choices = [
        [torch.empty([1] * rank, dtype=dtype, device="meta") for rank in _ranks(has)]
        for dtype, has in pair
        if dtype is not None
    ]
    if len(choices) < 2:
        return None
    found = {torch.result_type(one, other) for one, other in product(*choices)}
    return found.pop() if len(found) == 1 else None


def _ranks(has_dimensions: bool | None) -> list[int]:
    return [0, 1] if has_dimensions is None else [int(has_dimensions)]
