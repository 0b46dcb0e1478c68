"""``torch.jit.fork``: what is forked runs in the state of the place that forks it.

In eager mode a forked function runs at once, in the caller's region and with the caller's cast
cache. Two threads must not use one cache, and only gradients can tell whether it was shared. So
where gradients are recorded the function runs at once here too, and the fork hands over its result;
elsewhere it is forked, with a cache of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._graph import Editor, Graph, Node, Value
from .functions import Functions, lowered_function
from .regions import Site


def lower_fork(editor: Editor, site: Site, functions: Functions) -> None:
    """Lower what a fork runs, for the state at the fork.

    Args:
        editor: of the graph.
        site: a ``prim::fork`` and its state.
        functions: knows the bodies of what is called.
    """
    node = site.node
    body: Graph = node.g("Subgraph").copy()
    entry, values = site.state.entry()
    functions.prepare(body)
    functions.lower(body, entry)
    inputs = [*node.inputs(), *values]
    shares_casts = entry.in_region and bool(list(body.inputs())[-1].uses())
    if shares_casts:
        future = _fork_unless_recording(editor, node, body, inputs)
    else:
        future = _fork(editor, node, node, body, inputs)
    node.output().replaceAllUsesWith(future)
    node.destroy()


def _fork_unless_recording(
    editor: Editor, node: Node, body: Graph, inputs: Sequence[Value]
) -> Value:
    recording = editor.node_before(node, "aten::is_grad_enabled").output()
    recording.setType(torch._C.BoolType.get())
    branch = editor.node_before(node, "prim::If", recording)
    at_once, forked = branch.addBlock(), branch.addBlock()

    end = at_once.returnNode()
    result = editor.call_before(end, lowered_function("forked", body.copy()), *inputs)
    at_once.registerOutput(_fork(editor, node, end, _handing_over(result), [result]))

    end = forked.returnNode()
    own_cache = editor.cast_cache_before(end)
    forked.registerOutput(_fork(editor, node, end, body, [*inputs[:-1], own_cache]))

    branch.output().setType(node.output().type())
    return branch.output()


def _fork(
    editor: Editor, original: Node, before: Node, body: Graph, inputs: Sequence[Value]
) -> Value:
    made = editor.node_before(before, "prim::fork", *inputs)
    made.copyMetadata(original)
    made.g_("Subgraph", body)
    made.output().setType(original.output().type())
    return made.output()


def _handing_over(result: Value) -> Graph:
    """A graph that returns its one input."""
    graph = Graph()
    value = graph.addInput("result")
    value.setType(result.type())
    graph.registerOutput(value)
    return graph
