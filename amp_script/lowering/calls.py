"""Inlining: every call becomes the body of what is called.

TorchScript's own inliner copies *optimised* bodies, in which its autocast pass may have left casts
from an earlier run; this one copies the bodies as they were compiled. The constructor of a region
stays a call, so that all its arguments can still be read.
"""

from __future__ import annotations

from ._graph import Editor, Graph, nodes_of
from .callees import Callees
from .regions import is_region_constructor

_CALLS = frozenset({"prim::CallMethod", "prim::CallFunction"})


def inline_calls(graph: Graph, callees: Callees) -> None:
    """Replace each call whose body is known by that body, and so on inside.

    Args:
        graph: changed in place.
        callees: finds the bodies.
    """
    editor = Editor(graph)
    for node in nodes_of(graph):
        if node.kind() not in _CALLS or is_region_constructor(node):
            continue
        callee = callees.graph(node)
        if callee is None:
            continue
        body = callee.copy()
        inline_calls(body, callees)
        given = list(node.inputs())
        inputs = given if node.kind() == "prim::CallMethod" else given[1:]
        for old, new in zip(node.outputs(), editor.graph_before(node, body, inputs), strict=True):
            old.replaceAllUsesWith(new)
        node.destroy()
