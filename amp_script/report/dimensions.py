"""Whether a tensor surely has dimensions, which decides what two dtypes promote to.

A tensor without dimensions does not widen one that has some: bfloat16 and a float32 scalar tensor
make bfloat16, bfloat16 and a float32 matrix float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Final

import torch

from amp_script.compute.operators import KEEP_DTYPE, PROMOTE
from amp_script.lowering._graph import Node, Value, constant, is_constant

__all__ = ["Dimensions", "promoted"]


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


_ALWAYS: Final = _aten(
    "linear conv1d conv2d conv3d _convolution convolution conv_transpose1d conv_transpose2d "
    "conv_transpose3d mm addmm bmm baddbmm addbmm mv addmv outer addr embedding layer_norm "
    "batch_norm group_norm instance_norm rms_norm scaled_dot_product_attention cat concat stack "
    "unsqueeze flatten arange slice narrow unfold index_select repeat pad constant_pad_nd "
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d "
    "adaptive_avg_pool2d adaptive_avg_pool3d pixel_shuffle upsample_nearest2d upsample_bilinear2d "
    "one_hot nonzero masked_select gather lstm gru"
)
"""Operators whose tensors have dimensions, whatever they are given, or raise."""

_CHANGES: Final = _aten(
    "index mean sum amax amin select squeeze view reshape unflatten unbind chunk split "
    "split_with_sizes tensor_split diagonal expand broadcast_to view_as reshape_as expand_as "
    "take_along_dim embedding ravel"
)
"""Operators whose result may have fewer dimensions than their first argument, or more."""

_AS_FIRST: Final = (KEEP_DTYPE | _aten("to type_as masked_fill logical_not")) - _CHANGES - _ALWAYS
"""Operators whose result has as many dimensions as their first argument."""

_BROADCAST: Final = PROMOTE | _aten("eq ne lt le gt ge __and__ __or__ logical_and logical_or")
"""Operators whose result has as many dimensions as the argument with the most."""


class Dimensions:
    """Tells which tensors have dimensions.

    Args:
        known: by the number of a value how many dimensions it has.
    """

    def __init__(self, known: Mapping[int, int]) -> None:
        self._known: dict[int, bool | None] = {key: rank > 0 for key, rank in known.items()}

    def has(self, value: Value) -> bool | None:
        """Whether a tensor has dimensions; None where the program does not tell."""
        key = value.unique()
        if key not in self._known:
            self._known[key] = None  # what leads back to itself does not tell
            self._known[key] = self._find(value)
        return self._known[key]

    def _find(self, value: Value) -> bool | None:
        node = value.node()
        kind = node.kind()
        if kind == "prim::Constant":
            held = constant(value)
            return held.dim() > 0 if isinstance(held, torch.Tensor) else None
        if kind in _ALWAYS:
            return True
        if kind in ("aten::view", "aten::reshape"):
            return _is_filled(node.inputsAt(1))
        if kind in _AS_FIRST:
            return self.has(node.inputsAt(0))
        if kind in _BROADCAST:
            return _any([self.has(each) for each in node.inputs() if _is_tensor(each)])
        if kind == "prim::If":
            ends = {self.has(list(block.outputs())[value.offset()]) for block in node.blocks()}
            return ends.pop() if len(ends) == 1 else None
        return None


def _any(found: Iterable[bool | None]) -> bool | None:
    answers = set(found)
    return True if True in answers else None if None in answers else False


def _is_filled(sizes: Value) -> bool | None:
    """Whether a list of sizes has items."""
    if is_constant(sizes):
        return bool(constant(sizes))
    node = sizes.node()
    return node.inputsSize() > 0 if node.kind() == "prim::ListConstruct" else None


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
