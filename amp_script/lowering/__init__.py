"""TorchScript graph passes that turn autocast regions into explicit casts."""

from __future__ import annotations

import torch

from ..jit_state import AmbientState, jit_autocast_pass, shield
from ._graph import Editor, Graph
from .addmm import keep_addmm_whole
from .callees import Callees
from .calls import inline_calls
from .casts import insert_casts
from .cleanup import fold, tidy
from .composites import expand_composites
from .regions import resolve_regions
from .state import ProgramState

__all__ = ["Callees", "lower_graph"]


def lower_graph(
    graph: Graph,
    state: AmbientState,
    callees: Callees | None = None,
    *,
    given_cache: bool = False,
) -> None:
    """Turn the autocast regions in a graph into explicit casts.

    Args:
        graph: changed in place; calls in it are inlined. It must not have run yet.
        state: the autocast state that the program is called in.
        callees: knows the bodies of what the graph calls; by default, of everything that was
            compiled in this process.
        given_cache: whether the caller's region outlasts one call of the program. Its casts of
            leaf tensors are then kept in a ``Dict[Tensor, Tensor]`` that the graph takes as an
            input after its own.

    Raises:
        LoweringError: the program cannot be lowered without differing from eager autocast.
    """
    callees = callees or Callees()
    with shield(), jit_autocast_pass(False):
        inline_calls(graph, callees)
        fold(graph)
        editor = Editor(graph)
        if given_cache:
            cache = editor.add_cast_cache_input()
        elif state.any_enabled:
            cache = editor.cast_cache_before(next(graph.nodes()))
        else:
            cache = None
        start = ProgramState.of(state, cache)
        regions = resolve_regions(editor, start, callees.parameters)
        expand_composites(graph, regions.active)
        sites = regions.remove()
        keep_addmm_whole(editor, sites)
        insert_casts(editor, sites)
        tidy(graph)

