"""What a pass inserts, written as a few lines of TorchScript."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from amp_script.lowering._graph import Editor, Graph, Node, Value

__all__ = ["insert"]


def insert(editor: Editor, node: Node, source: str, *inputs: Value) -> Value:
    """Insert the body of a function before a node, and return what it returns.

    What makes the result counts as a part of the node's line and submodule.

    Args:
        editor: of the graph that holds the node.
        node: the node to insert before.
        source: the text of a TorchScript function that returns one value.
        inputs: one value for each parameter of the function.
    """
    (output,) = editor.graph_before(node, _compiled(source), inputs)
    output.node().copyMetadata(node)
    return output


@cache
def _compiled(source: str) -> Graph:
    unit: Any = torch._C.CompilationUnit()
    unit.define(source, {"torch": torch}.get)
    (function,) = unit.get_functions()
    graph: Graph = function.graph
    return graph
