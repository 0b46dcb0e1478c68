"""Calls: each runs a copy of the callee that is lowered for the state at the call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ._graph import Editor, parsed_schema
from .casts import rule_of
from .composites.registry import decomposition
from .functions import CALLS, Contents, Functions, is_interface_call, name_of
from .helpers import PREFIX
from .queries import QUERIES
from .regions import Site
from .state import Entry


def redirect_calls(editor: Editor, sites: Sequence[Site], functions: Functions) -> None:
    """Make each call one of a copy that is lowered for the state at the call.

    A callee in which autocast would do nothing is called as it is.

    Args:
        editor: of the graph that holds the calls.
        sites: the calls among them are redirected.
        functions: makes the copies.
    """
    for site in sites:
        node = site.node
        if node.kind() not in CALLS or is_interface_call(node):
            continue
        name = name_of(node)
        if name.startswith(PREFIX):
            continue
        entry, values = site.state.entry()
        if not changes(functions.contents(name), entry):
            continue
        if functions.is_lowered_itself(name, entry):
            continue
        given = list(node.inputs())
        arguments = given if node.kind() == "prim::CallMethod" else given[1:]
        called = functions.lowered(name, entry)
        result = editor.call_before(node, called, *arguments, *values)
        node.output().replaceAllUsesWith(result)
        node.destroy()


def changes(contents: Contents, entry: Entry) -> bool:
    """Whether lowering for a state changes something with the given contents."""
    return contents.has_regions or any(
        _changes(schema, entry.active) for schema in contents.schemas
    )


@cache
def _changes(schema: str, active: Sequence[str]) -> bool:
    parsed = parsed_schema(schema)
    if parsed is None:
        return False
    if parsed.name in QUERIES or parsed.name == "aten::addmm":
        return True
    operator = schema.partition("(")[0]
    composite = decomposition(operator)
    return any(
        rule_of(device_type, schema) is not None
        or (composite is not None and composite.reaches(device_type))
        for device_type in active
    )
