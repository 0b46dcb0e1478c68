"""``torch.jit.fork``: what is forked runs in the state of the place that forks it.

In eager mode a forked function runs at once, in the caller's region and with the caller's cast
cache. Two threads must not use one cache, so a fork gets a cache of its own, which only gradients
can tell; and after a wait TorchScript may go on in another thread, whose operators autograd puts in
another order. So where gradients are recorded, a program that forks is lowered to one that runs
everything at once.
"""

from __future__ import annotations

from ._graph import Editor, Graph, Type, all_values, retyped
from .functions import Functions
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
    if entry.in_region:
        inputs[-1] = editor.cast_cache_before(node)
    fork = editor.node_before(node, "prim::fork", *inputs)
    fork.copyMetadata(node)
    fork.g_("Subgraph", body)
    fork.output().setType(node.output().type())
    node.output().replaceAllUsesWith(fork.output())
    node.destroy()


def run_forks_at_once(graph: Graph, functions: Functions) -> None:
    """Put what each fork runs in its place, and make every future its result.

    Args:
        graph: changed in place.
        functions: knows the bodies of what is called.
    """
    editor = Editor(graph)
    for node in graph.findAllNodes("prim::fork"):
        body: Graph = node.g("Subgraph").copy()
        functions.prepare(body)
        run_forks_at_once(body, functions)
        (result,) = editor.graph_before(node, body, list(node.inputs()))
        node.output().replaceAllUsesWith(result)
        node.destroy()
    for node in graph.findAllNodes("aten::wait"):
        node.output().replaceAllUsesWith(node.inputsAt(0))
        node.destroy()
    for value in all_values(graph):
        kind = retyped(value.type(), _result_of)
        if kind is not None:
            value.setType(kind)


def _result_of(kind: Type) -> Type | None:
    return kind.getElementType() if kind.kind() == "FutureType" else None
