"""Finding the bodies of what a graph calls.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._state._python_cu``,
``torch._C.CompilationUnit.find_function``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._graph import Graph, Node


class Callees:
    """The functions and methods of one compilation unit, by qualified name.

    Args:
        unit: where to look; by default, where everything compiled in this process is.
    """

    def __init__(self, unit: torch._C.CompilationUnit | None = None) -> None:
        self._unit = torch.jit._state._python_cu if unit is None else unit

    def graph(self, node: Node) -> Graph | None:
        """The graph that a ``prim::CallMethod`` or ``prim::CallFunction`` runs; None if unknown."""
        return self.graph_named(_name(node))

    def graph_named(self, name: str) -> Graph | None:
        """The graph of the function or method with the qualified name; None if unknown."""
        function = self._unit.find_function(name)
        return None if function is None else function.graph

    def parameters(self, node: Node) -> Sequence[str]:
        """The parameter names of what the node calls."""
        graph = self.graph(node)
        assert graph is not None
        return [value.debugName().partition(".")[0] for value in graph.inputs()]


def _name(node: Node) -> str:
    called = node.inputsAt(0).type()
    if node.kind() == "prim::CallFunction":
        return str(called.annotation_str)
    return f"{called.qualified_name()}.{node.s('name')}"
