"""TorchScript graph passes that turn autocast regions into explicit casts."""

from __future__ import annotations

import torch

from ..jit_state import AmbientState, jit_autocast_pass, shield
from ._graph import Editor, Graph, Node, nodes_of
from .addmm import keep_addmm_whole
from .calls import inline_calls
from .casts import insert_casts
from .cleanup import clean_up
from .regions import resolve_regions
from .resolve import Callees
from .state import ProgramState

__all__ = ["Callees", "lower_graph"]


def lower_graph(graph: Graph, state: AmbientState, callees: Callees | None = None) -> None:
    """Turn the autocast regions in a graph into explicit casts.

    Args:
        graph: changed in place; calls in it are inlined. It must not have run yet.
        state: the autocast state that the program is called in.
        callees: knows the bodies of what the graph calls; by default, of everything that was
            compiled in this process.

    Raises:
        LoweringError: the program cannot be lowered without differing from eager autocast.
    """
    callees = callees or Callees()
    with shield(), jit_autocast_pass(False):
        inline_calls(graph, callees.graph)
        sites = resolve_regions(graph, ProgramState.of(state), callees.parameters, _keep)
        editor = Editor(graph)
        keep_addmm_whole(editor, [site.node for site in sites])
        insert_casts(editor, sites)
        clean_up(graph)


def _keep(editor: Editor, node: Node, state: ProgramState) -> None:
    return None
