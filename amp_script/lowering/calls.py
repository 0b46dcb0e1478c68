"""Inlining: every call becomes the body of what is called.

TorchScript's own inliner copies *optimised* bodies, in which its autocast pass may have left casts
from an earlier run; this one copies the bodies as they were compiled. The constructor of a region
stays a call, so that all its arguments can still be read.
"""

from __future__ import annotations

from collections.abc import Callable

from ._graph import Editor, Graph, Node, nodes_of
from .regions import is_region_constructor

Resolver = Callable[[Node], Graph | None]
"""Finds the graph that a ``prim::CallMethod`` or ``prim::CallFunction`` runs; None if unknown."""


def inline_calls(graph: Graph, resolve: Resolver) -> None:
    """Replace each call whose body ``resolve`` finds by that body, and so on inside.

    Args:
        graph: changed in place.
        resolve: must return a graph that this function may copy from; it is not changed.
    """
    editor = Editor(graph)
    pending = nodes_of(graph)
    while pending:
        node = pending.pop()
        kind = node.kind()
        if kind not in ("prim::CallMethod", "prim::CallFunction") or is_region_constructor(node):
            continue
        callee = resolve(node)
        if callee is None:
            continue
        body = callee.copy()
        inline_calls(body, resolve)
        inputs = list(node.inputs())
        arguments = inputs if kind == "prim::CallMethod" else inputs[1:]
        outputs = editor.graph_before(node, body, arguments)
        if node.outputsSize():
            node.output().replaceAllUsesWith(outputs[0])
        node.destroy()
