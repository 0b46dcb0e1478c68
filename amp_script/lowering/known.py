"""What is known about casts already made: which values need none, and which can be used again."""

from __future__ import annotations

from collections.abc import Sequence

from .. import policy
from ._graph import Graph, Node, Value, is_none, is_tensor, parsed_schema
from .regions import Site


def _operators(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


AS_FIRST = _operators(
    """
    alias broadcast_to channel_shuffle clone constant_pad_nd contiguous detach dropout expand
    expand_as feature_dropout flatten flip gather index_select layer_norm batch_norm group_norm
    instance_norm gelu leaky_relu masked_select max_pool1d max_pool2d max_pool3d movedim mT narrow
    pad permute pixel_shuffle pixel_unshuffle relu relu6 repeat reshape reshape_as roll select
    silu slice softmax squeeze swapaxes swapdims t transpose tril triu unflatten unfold unsqueeze
    upsample_nearest1d upsample_nearest2d upsample_nearest3d view view_as
    """
)
"""Operators whose result has the dtype of their first tensor argument, integer or not, unless
another dtype is given by an argument."""

_PROMOTED = frozenset({"aten::add", "aten::sub", "aten::mul"})
"""Operators whose result, of two tensors, has the dtype that they promote to."""

_LIKE_ALL = _operators(
    """
    addbmm addmm baddbmm bmm conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
    conv_transpose3d linear matmul mm scaled_dot_product_attention
    """
)
"""Operators whose tensor arguments must have one dtype, which is the result's."""

_IN_PARTS = _operators("chunk split split_with_sizes tensor_split unbind")
"""Operators whose result is a list of parts of their first argument."""

_NEVER_LEAF = _LIKE_ALL | _operators(
    """
    add batch_norm div embedding exp gelu group_norm layer_norm log_softmax mean mul permute relu
    reshape select sigmoid silu slice softmax sub sum tanh transpose unsqueeze view
    """
)
"""Operators whose result is a tensor of its own, so that it is no leaf with gradients."""


def may_be_leaf(value: Value) -> bool:
    """Whether the value may be a leaf tensor with gradients, whose casts eager autocast caches."""
    return value.node().kind() not in _NEVER_LEAF and _whole(value) is None


def _whole(value: Value) -> Value | None:
    """What the value is a part of, if it was taken apart."""
    node = value.node()
    if node.kind() != "prim::ListUnpack":
        return None
    made_by = node.inputsAt(0).node()
    return made_by.inputsAt(0) if made_by.kind() in _IN_PARTS else None


class KnownCasts:
    """The casts written so far into one graph.

    Args:
        graph: the graph, before the first cast.
        sites: the operators in it.
    """

    def __init__(self, graph: Graph, sites: Sequence[Site]) -> None:
        writes = any(_may_write(site.node) for site in sites)
        self._aliases = graph.alias_db() if writes else None
        self._made: dict[tuple[Value, int | Value], list[tuple[tuple[int, ...], Value]]] = {}
        self._right: set[tuple[Value, int | Value]] = set()

    def add(self, value: Value, target: int | Value, path: tuple[int, ...], made: Value) -> None:
        """Remember a cast that can be used again.

        Args:
            value: what was cast.
            target: to which dtype.
            path: the blocks in which the cast is, the outermost first.
            made: the result.
        """
        self._made.setdefault((value, target), []).append((path, made))

    def add_right(self, value: Value, target: int | Value) -> None:
        """Remember that a cast of the value to the target changes nothing."""
        self._right.add((value, target))

    def made(self, value: Value, target: int | Value, path: tuple[int, ...]) -> Value | None:
        """An earlier cast of the value that can be reached from a block, or None.

        A value that the program may write to has none, as the cast would not see the change.
        """
        for made_in, made in self._made.get((value, target), ()):
            if path[: len(made_in)] == made_in and not self._is_written(value):
                return made
        return None

    def is_right(self, value: Value, target: int | Value) -> bool:
        """Whether a cast of the value to the target surely changes nothing.

        A cast leaves values alone that have the target's dtype, or are not eligible. An operator
        that keeps the dtype of its arguments, or promotes them, leads from such values to such
        values: two of them promote to neither float32 nor the other half type.
        """
        known = (value, target) in self._right
        if not known and self._follows(value, target):
            self._right.add((value, target))
            known = True
        return known

    def _follows(self, value: Value, target: int | Value) -> bool:
        node = value.node()
        kind = node.kind()
        if kind == "prim::If":
            ways = [list(way.outputs())[value.offset()] for way in node.blocks()]
            return all(self.is_right(way, target) for way in ways)
        whole = _whole(value)
        if whole is not None:
            return self.is_right(whole, target)
        if kind in AS_FIRST:
            return not _takes_dtype(node) and self.is_right(node.inputsAt(0), target)
        if kind in _LIKE_ALL or kind in _PROMOTED:
            tensors = [each for each in node.inputs() if is_tensor(each)]
        if kind in _LIKE_ALL:
            return any(self.is_right(each, target) for each in tensors)
        if kind in _PROMOTED and len(tensors) == 2:
            return all(self.is_right(each, target) for each in tensors)
        return False

    def _is_written(self, value: Value) -> bool:
        return self._aliases is not None and bool(self._aliases.has_writers(value))


def _may_write(node: Node) -> bool:
    """Whether the node may change a tensor in place."""
    return node.kind().startswith("prim::") or "!" in node.schema()


def _takes_dtype(node: Node) -> bool:
    """Whether the operator is given a dtype for its result."""
    schema = parsed_schema(node.schema())
    if schema is None:
        return True
    return any(not is_none(node.inputsAt(i)) for i in policy.optional_dtype_arguments(schema))
