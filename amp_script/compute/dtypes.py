"""Which dtype each value of a frozen graph has, as far as the graph tells.

Freezing drops the dtypes that tracing saw, but constants have theirs, casts name theirs, and most
operators keep or promote what they are given. A value whose dtype does not follow is left out: no
plan touches what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TypeAlias

import torch

from amp_script.lowering._graph import (
    Block,
    Graph,
    Node,
    Value,
    constant,
    dtypes_by_code,
    is_constant,
    is_none,
)

from .operators import KEEP_DTYPE, KINDS, PROMOTE

__all__ = ["Dtypes", "Rule", "cast_dtype", "infer", "input_name", "results"]


class Dtypes:
    """Dtypes by value; of a list, the dtype that all its tensors have."""

    def __init__(self) -> None:
        self._by_name: dict[str, torch.dtype] = {}

    def of(self, value: Value) -> torch.dtype | None:
        """The dtype of a tensor or of every tensor in a list; ``None`` where it is not known."""
        return self._by_name.get(value.debugName())

    def set(self, value: Value, dtype: torch.dtype | None) -> None:
        """Record a dtype, or that it is not known."""
        if dtype is None:
            self._by_name.pop(value.debugName(), None)
        else:
            self._by_name[value.debugName()] = dtype

    def of_operands(self, node: Node) -> torch.dtype | None:
        """The floating-point dtype that all known tensor arguments share, if there is one."""
        found = {dtype for value in node.inputs() if (dtype := self.of(value))}
        found = {dtype for dtype in found if dtype.is_floating_point}
        return found.pop() if len(found) == 1 else None


Rule: TypeAlias = "Callable[[Node, Dtypes], Sequence[torch.dtype | None]]"
"""Dtypes of a node's results; none at all where the rule does not say."""


def infer(graph: Graph, inputs: Mapping[str, torch.dtype], rule: Rule | None = None) -> Dtypes:
    """Work out dtypes from the constants, the casts and the dtypes of the inputs.

    Args:
        graph: a frozen graph, with its calls inlined.
        inputs: dtypes of tensor inputs by their names.
        rule: what tells the dtypes of a node's results; :func:`results` if not given.
    """
    dtypes = Dtypes()
    for value in graph.inputs():
        dtypes.set(value, inputs.get(input_name(value)))
    _infer_block(graph.block(), dtypes, rule or results)
    return dtypes


def input_name(value: Value) -> str:
    """The name that a graph's input has in the method's schema: without the graph's suffix."""
    return str(value.debugName().split(".")[0])


def _infer_block(block: Block, dtypes: Dtypes, rule: Rule) -> None:
    for node in block.nodes():
        outputs = list(node.outputs())
        if node.kind() == "prim::If":
            _infer_branches(node, outputs, dtypes, rule)
        elif node.kind() == "prim::Loop":
            _infer_loop(node, outputs, dtypes, rule)
        else:
            known = (*rule(node, dtypes), *repeat(None, len(outputs)))
            for value, dtype in zip(outputs, known, strict=False):
                dtypes.set(value, dtype)


def _infer_branches(node: Node, outputs: Sequence[Value], dtypes: Dtypes, rule: Rule) -> None:
    branches = list(node.blocks())
    for branch in branches:
        _infer_block(branch, dtypes, rule)
    for value, *ends in zip(outputs, *(branch.outputs() for branch in branches), strict=True):
        dtypes.set(value, _shared(dtypes.of(end) for end in ends if not _is_never_used(end)))


def _is_never_used(value: Value) -> bool:
    """Whether the value stands where a branch ends in an exception."""
    return bool(value.node().kind() == "prim::Uninitialized")


def _infer_loop(node: Node, outputs: Sequence[Value], dtypes: Dtypes, rule: Rule) -> None:
    (body,) = node.blocks()
    carried = list(body.inputs())[1:]
    for value, start in zip(carried, list(node.inputs())[2:], strict=True):
        dtypes.set(value, dtypes.of(start))
    settled = False
    while not settled:
        _infer_block(body, dtypes, rule)
        settled = True
        for value, result in zip(carried, list(body.outputs())[1:], strict=True):
            if dtypes.of(value) not in (None, dtypes.of(result)):
                dtypes.set(value, None)
                settled = False
    for value, inside in zip(outputs, carried, strict=True):
        dtypes.set(value, dtypes.of(inside))


def results(node: Node, dtypes: Dtypes) -> Sequence[torch.dtype | None]:
    """Dtypes of a node's results; none at all where they do not follow."""
    kind, count = node.kind(), node.outputsSize()
    if kind == "prim::Constant":
        return [_of_constant(node.output())]
    if kind in ("prim::ListConstruct", "prim::ListUnpack"):
        return [_shared(dtypes.of(value) for value in node.inputs())] * count
    if kind == "aten::__getitem__":
        return [dtypes.of(node.inputsAt(0))]
    cast = cast_dtype(node)
    if cast is not None:
        return [cast]
    if kind == "aten::type_as":
        return [dtypes.of(node.inputsAt(1))]
    if _names_dtype(node):
        return []
    if kind in KINDS:
        return [dtypes.of_operands(node)] * count
    if kind in KEEP_DTYPE:
        first = dtypes.of(next(node.inputs()))
        return [first if first is not None and first.is_floating_point else None]
    if kind in PROMOTE:
        return [_promoted(node, dtypes)]
    return []


def cast_dtype(node: Node) -> torch.dtype | None:
    """The dtype that a node casts its first argument to; ``None`` if it is no such node."""
    if node.kind() != "aten::to" or not node.schema().startswith(("aten::to.dtype(", _TO_LAYOUT)):
        return None
    code = node.inputsAt(1)
    return dtypes_by_code()[constant(code)] if _is_number(code) else None


_TO_LAYOUT = "aten::to.dtype_layout("


def _is_number(value: Value) -> bool:
    return is_constant(value) and isinstance(constant(value), int)


def _names_dtype(node: Node) -> bool:
    """Whether an argument gives the dtype of the result."""
    schema = node.schema()
    if "ScalarType" not in schema:
        return False
    arguments = torch._C.parse_schema(schema).arguments
    given = zip(arguments, node.inputs(), strict=False)
    return any(
        argument.name in ("dtype", "out_dtype") and not is_none(value) for argument, value in given
    )


def _of_constant(value: Value) -> torch.dtype | None:
    if value.type().kind() not in ("TensorType", "ListType"):
        return None
    held = constant(value)
    tensors = held if isinstance(held, list) else [held]
    return _shared(item.dtype if isinstance(item, torch.Tensor) else None for item in tensors)


def _shared(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    found = set(dtypes)
    return found.pop() if len(found) == 1 else None


def _promoted(node: Node, dtypes: Dtypes) -> torch.dtype | None:
    """The dtype that all floating tensors share; zero-dimensional constants promote nothing."""
    found = set()
    for value in node.inputs():
        if value.type().kind() not in ("TensorType", "ListType"):
            continue
        held = constant(value) if is_constant(value) else None
        if isinstance(held, torch.Tensor) and held.dim() == 0:
            continue
        dtype = dtypes.of(value)
        if dtype is None or dtype.is_floating_point:
            found.add(dtype)
    return found.pop() if len(found) == 1 else None
