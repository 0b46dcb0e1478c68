"""Calls: each runs what is lowered for the state at the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from ..errors import LoweringError
from ._graph import Editor, parsed_schema, source_of
from .casts import rule_of
from .composites.registry import decomposition
from .forks import lower_fork
from .functions import Contents, Functions, is_interface_call, name_of
from .helpers import PREFIX
from .python_calls import enter_state_around
from .queries import QUERIES
from .regions import Site
from .state import Entry


def lower_calls(editor: Editor, sites: Sequence[Site], functions: Functions) -> None:
    """Make each call one of something that is lowered for the state at the call.

    Args:
        editor: of the graph that holds the calls.
        sites: the calls among them are changed.
        functions: knows the bodies of what is called.

    Raises:
        LoweringError: what is called in a region is known only while running.
    """
    for site in sites:
        lower_call = _KINDS.get(site.node.kind())
        if lower_call is not None:
            lower_call(editor, site, functions)


def changes(contents: Contents, entry: Entry) -> bool:
    """Whether lowering for a state changes something with the given contents."""
    return (
        contents.has_regions
        or (contents.leaves and bool(entry.active))
        or (contents.forks and entry.forks_at_once)
        or any(_changes(schema, entry.active) for schema in contents.schemas)
    )


@cache
def _changes(schema: str, active: Sequence[str]) -> bool:
    parsed = parsed_schema(schema)
    if parsed is None:
        return False
    if parsed.name in QUERIES or parsed.name == "aten::addmm":
        return True
    if parsed.name in _KINDS and active:
        return True
    composite = decomposition(schema.partition("(")[0])
    return any(
        rule_of(device_type, schema) is not None
        or (composite is not None and composite.reaches(device_type))
        for device_type in active
    )


def _redirect(editor: Editor, site: Site, functions: Functions) -> None:
    """Call a copy of a function or method; or itself, if autocast does nothing in it."""
    node = site.node
    if is_interface_call(node):
        _refuse_interface(site)
        return
    name = name_of(node)
    if name.startswith(PREFIX):
        return
    entry, values = site.state.entry()
    if not changes(functions.contents(name), entry) or functions.is_lowered_itself(name, entry):
        return
    given = list(node.inputs())
    arguments = given if node.kind() == "prim::CallMethod" else given[1:]
    called = functions.lowered(name, entry)
    result = editor.call_before(node, called, *arguments, *values)
    node.output().replaceAllUsesWith(result)
    node.destroy()


def _refuse_interface(site: Site) -> None:
    """Refuse a call whose callee may be any implementation of an interface, inside a region."""
    if site.state.active():
        raise LoweringError(
            name_of(site.node),
            "which implementation of the interface is called is known only while running, and "
            "autocast is on here",
            source=source_of(site.node),
            advice="call the submodule by its name, or call it outside the region",
        )


def _lower_fork(editor: Editor, site: Site, functions: Functions) -> None:
    entry, _ = site.state.entry()
    if changes(functions.contents_of(site.node.g("Subgraph")), entry):
        lower_fork(editor, site, functions)


def _enter_state(editor: Editor, site: Site, functions: Functions) -> None:
    enter_state_around(editor, site)


_KINDS: dict[str, Callable[[Editor, Site, Functions], None]] = {
    "prim::CallMethod": _redirect,
    "prim::CallFunction": _redirect,
    "prim::fork": _lower_fork,
    "prim::PythonOp": _enter_state,
    "aten::grad": _enter_state,
    "aten::backward": _enter_state,
}
