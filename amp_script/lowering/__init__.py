"""TorchScript graph passes that turn autocast regions into explicit casts."""

from __future__ import annotations

from ..jit_state import AmbientState, jit_autocast_pass, shield
from ._graph import Editor, Graph
from .addmm import keep_addmm_whole
from .calls import changes, lower_calls
from .casts import insert_casts
from .cleanup import tidy
from .composites import expand_composites
from .forks import run_forks_at_once
from .functions import Functions
from .regions import resolve_regions
from .scalars import keep_scalars_tensors
from .state import Entry

__all__ = ["Entry", "Functions", "changes", "lower_graph", "lower_prepared"]


def lower_graph(graph: Graph, state: AmbientState, functions: Functions | None = None) -> None:
    """Turn the autocast regions in a graph, and in what it calls, into explicit casts.

    Args:
        graph: changed in place; it must not have run yet.
        state: the autocast state that the program is called in.
        functions: knows the bodies of what the graph calls; by default, of everything that was
            compiled in this process.

    Raises:
        LoweringError: the program cannot be lowered without differing from eager autocast.
    """
    functions = functions or Functions(lower_prepared)
    functions.prepare(graph)
    lower_prepared(graph, Entry.of(state, in_region=False), functions)


def lower_prepared(graph: Graph, entry: Entry, functions: Functions) -> None:
    """Lower a graph that :meth:`Functions.prepare` has been through.

    It need not have been if there is no region in it, and autocast is off where it is called.

    Args:
        graph: changed in place. What ``entry`` leaves open becomes inputs after its own.
        entry: the state that the program is called in.
        functions: knows the bodies of what the graph calls.

    Raises:
        LoweringError: the program cannot be lowered without differing from eager autocast.
    """
    with shield(), jit_autocast_pass(False):
        if entry.forks_at_once:
            run_forks_at_once(graph, functions)
        editor = Editor(graph)
        regions = resolve_regions(editor, entry.start(editor))
        if regions.may_hold_composites():
            expand_composites(graph, regions.active)
        sites = regions.remove()
        keep_addmm_whole(editor)
        keep_scalars_tensors(editor)
        insert_casts(editor, sites)
        lower_calls(editor, sites, functions)
        tidy(graph)
