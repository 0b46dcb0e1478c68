"""The first place in which two recordings of one model differ.

Two runs of a model on inputs of different sizes, or with and without gradients, record the same
operators unless Python took another path, and the same constants unless a number was read off the
inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import torch

from amp_script.lowering._graph import Block, Graph, Node, Value, source_of
from amp_script.tracing.gradient_paths import MARK

__all__ = ["Difference", "first_difference"]


@dataclass(frozen=True)
class Difference:
    """A node of one recording that the other has not.

    Attributes:
        line: the model's source line, or ``""`` where the recording kept none.
        one: what the first recording has there.
        other: what the second has.
    """

    line: str
    one: str
    other: str


def first_difference(one: Graph, other: Graph) -> Difference | None:
    """Compare two graphs by operators, constants and who takes whose result; None if alike.

    Types, and so sizes, that a recording notes at values do not count.
    """
    return _Comparison().blocks(one.block(), other.block())


class _Comparison:
    def __init__(self) -> None:
        self._partner: dict[int, int] = {}

    def blocks(self, one: Block, other: Block) -> Difference | None:
        self._pair(list(one.inputs()), list(other.inputs()))
        for a, b in zip_longest(_nodes(one), _nodes(other)):
            found = self._nodes(a, b)
            if found is not None:
                return found
        if not self._alike(list(one.outputs()), list(other.outputs())):
            return Difference("", "its outputs", "other outputs")
        return None

    def _nodes(self, a: Node | None, b: Node | None) -> Difference | None:
        if a is None or b is None or a.kind() != b.kind():
            return _difference(a, b)
        if not self._alike(list(a.inputs()), list(b.inputs())) or not _same_attributes(a, b):
            return _difference(a, b)
        inner = zip_longest(a.blocks(), b.blocks())
        for x, y in inner:
            if x is None or y is None:
                return _difference(a, b)
            found = self.blocks(x, y)
            if found is not None:
                return found
        self._pair(list(a.outputs()), list(b.outputs()))
        return None

    def _pair(self, one: Sequence[Value], other: Sequence[Value]) -> None:
        for a, b in zip(one, other, strict=False):
            self._partner[a.unique()] = b.unique()

    def _alike(self, one: Sequence[Value], other: Sequence[Value]) -> bool:
        """Whether two lists of values are constants alike, or results of partners."""
        return len(one) == len(other) and all(map(self._same_value, one, other))

    def _same_value(self, a: Value, b: Value) -> bool:
        kinds = {a.node().kind(), b.node().kind()}
        if kinds & _WHERE_USED:
            return len(kinds) == 1 and (
                _same_constant(a, b)
                if kinds == {"prim::Constant"}
                else self._alike(list(a.node().inputs()), list(b.node().inputs()))
            )
        return self._partner.get(a.unique()) == b.unique()


_WHERE_USED: Final = frozenset({"prim::Constant", "prim::ListConstruct"})
"""Nodes that are compared where they are used, which is at a line that says more."""


def _nodes(block: Block) -> Iterator[Node]:
    return (node for node in block.nodes() if node.kind() not in _WHERE_USED)


def _same_constant(a: Value, b: Value) -> bool:
    x, y = a.toIValue(), b.toIValue()
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and x.shape == y.shape and _same_bits(x, y)
    return type(x) is type(y) and bool(x == y or (x != x and y != y))


def _same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool(torch.equal(x, y)) or bool(((x == y) | ((x != x) & (y != y))).all())


def _same_attributes(a: Node, b: Node) -> bool:
    names = [name for name in a.attributeNames() if name != MARK]
    if names != [name for name in b.attributeNames() if name != MARK]:
        return False
    return all(a.kindOf(name) != "s" or a.s(name) == b.s(name) for name in names)


def _difference(a: Node | None, b: Node | None) -> Difference:
    lines = [source_of(node) for node in (a, b) if node is not None]
    return Difference(next(filter(None, lines), ""), _text(a), _text(b))


def _text(node: Node | None) -> str:
    """An operator with its constant inputs, such as ``view(_, [2, 8])``."""
    if node is None:
        return "the end"
    arguments = ", ".join(_argument(value) for value in node.inputs())
    return f"{node.kind().partition('::')[2]}({arguments})"


def _argument(value: Value) -> str:
    node = value.node()
    if node.kind() == "prim::Constant":
        held = value.toIValue()
        return f"tensor {list(held.shape)}" if isinstance(held, torch.Tensor) else repr(held)
    if node.kind() == "prim::ListConstruct":
        return "[" + ", ".join(_argument(item) for item in node.inputs()) + "]"
    return "_"
