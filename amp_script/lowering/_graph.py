"""Reading and changing TorchScript graphs: the only module of the passes that knows the raw API.

Passes say *what* to insert as a few lines of TorchScript (:func:`template`), which keeps them
readable and typed; this module compiles each once and copies its graph to where it is needed.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.Graph``, ``Node``, ``Value``,
``Block`` and their methods; ``torch._C.CompilationUnit``; the ``torch._C._jit_pass_*`` functions
named in :mod:`amp_script.lowering.cleanup`.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from ..jit_state import jit_autocast_pass

Graph = torch._C.Graph
Node = torch._C.Node
Value = torch._C.Value
Block = torch._C.Block

TABLE_SIZE = 64
"""Entries of a table over dtypes; torch 2.15 has 46 scalar types, and numbers are never reused."""


@lru_cache(maxsize=None)
def dtype_code(dtype: torch.dtype) -> int:
    """The number by which TorchScript knows a dtype."""
    graph = Graph()
    code = graph.insertConstant(dtype).toIValue()
    assert isinstance(code, int)
    return code


@lru_cache(maxsize=1)
def dtypes_by_code() -> dict[int, torch.dtype]:
    """Every dtype of the installed torch by its number."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype_code(dtype): dtype for dtype in dtypes}


def is_constant(value: Value) -> bool:
    """Whether the value is a constant in the graph (the constant None included)."""
    return bool(value.node().kind() == "prim::Constant")


def constant(value: Value) -> Any:
    """The Python value of a constant."""
    return value.toIValue()


def is_none(value: Value) -> bool:
    """Whether the value is surely None."""
    return bool(value.type().kind() == "NoneType")


def is_tensor(value: Value) -> bool:
    """Whether the value is typed as a tensor, and not as an optional one."""
    return bool(value.type().kind() == "TensorType")


def is_optional_tensor(value: Value) -> bool:
    """Whether the value is typed ``Optional[Tensor]``."""
    kind = value.type()
    return bool(kind.kind() == "OptionalType" and kind.getElementType().kind() == "TensorType")


def is_tensor_list(value: Value) -> bool:
    """Whether the value is typed ``List[Tensor]``."""
    kind = value.type()
    return bool(kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType")


def blocks_of(graph: Graph) -> Iterator[Block]:
    """The graph's own block and every block inside it, outer ones first."""
    pending = [graph.block()]
    while pending:
        block = pending.pop()
        yield block
        for node in block.nodes():
            pending.extend(node.blocks())


def nodes_of(graph: Graph) -> list[Node]:
    """Every node, in any block."""
    return [node for block in blocks_of(graph) for node in block.nodes()]


_RANGE = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)')


def source_of(node: Node) -> str:
    """The user's source line as ``file:line: text``, or ``""`` where TorchScript kept none."""
    found = _RANGE.search(node.sourceRange())
    if found is None:
        return ""
    file, line = found["file"], int(found["line"])
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}: {text}" if text else f"{file}:{line}"


@lru_cache(maxsize=None)
def template(source: str) -> Graph:
    """Compile one TorchScript function, given as text, and return its graph."""
    with jit_autocast_pass(False):
        unit = torch._C.CompilationUnit()
        unit.define(source, {"torch": torch}.get)
        (function,) = unit.get_functions()
        graph: Graph = function.graph
        torch._C._jit_pass_inline(graph)
    return graph


class Editor:
    """Inserts into one graph.

    Args:
        graph: the graph to change.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._constants: dict[object, Value] = {}

    def before(self, node: Node, source: str, *inputs: Value) -> Value:
        """Insert the body of a template that returns one value, and return that value.

        Args:
            node: the node to insert before.
            source: text of the template, see :func:`template`.
            inputs: one value for each parameter of the template.
        """
        (output,) = self.graph_before(node, template(source), inputs)
        return output

    def graph_before(self, node: Node, callee: Graph, inputs: Sequence[Value]) -> list[Value]:
        """Copy the body of a graph to before ``node`` and return what it returns."""
        with self._at(node):
            outputs: list[Value] = self.graph.insertGraph(callee, list(inputs))
        return outputs

    def node_before(self, node: Node, kind: str, *inputs: Value, outputs: int = 1) -> Node:
        """Insert a node of the given kind, whose output types are the caller's to set."""
        with self._at(node):
            return self.graph.insertNode(self.graph.create(kind, list(inputs), outputs))

    def constant_before(self, node: Node, value: object) -> Value:
        """Insert a constant of any type TorchScript infers from the Python value."""
        with self._at(node):
            return self.graph.insertConstant(value)

    @contextmanager
    def _at(self, node: Node) -> Iterator[None]:
        """Insert before ``node``; a later pass aborts if the insert point is a dead node."""
        self.graph.setInsertPoint(node)
        yield
        self.graph.setInsertPoint(self.graph.block())

    def shared_constant(self, key: object, value: object) -> Value:
        """A constant at the top of the graph, inserted once for each hashable ``key``."""
        if key not in self._constants:
            first = next(self.graph.nodes(), self.graph.return_node())
            self._constants[key] = self.constant_before(first, value)
        return self._constants[key]
