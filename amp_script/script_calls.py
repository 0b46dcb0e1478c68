"""Scripted functions and modules that eager code calls, lowered for the state they are called in.

A model may hold TorchScript: a submodule, a function, what ``torch.jit.script_if_tracing`` compiles
on the way. Its graph is executed without the casts and regions that a trace or an eager run should
see. Inside :func:`lowered_script_calls` each call runs, and records, the graph lowered for the
calling thread's autocast state.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ScriptMethod``,
``torch._C.ScriptFunction``, ``torch._C.CompilationUnit``, ``torch.jit._state._python_cu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.jit._state import _python_cu

from amp_script.interception import replaced
from amp_script.jit_state import AmbientState, shield
from amp_script.lowering import lower_graph
from amp_script.programs import Compiled, Program, originals

__all__ = ["LoweredCalls", "lowered_script_calls"]


@contextmanager
def lowered_script_calls() -> Iterator[LoweredCalls]:
    """Lower what the calling thread calls of TorchScript inside the block.

    The compiled functions and modules stay as they are, for other threads and afterwards. What was
    lowered lives as long as what the block yields.
    """
    functions = LoweredCalls()
    with ExitStack() as stack:
        for kind in (torch._C.ScriptMethod, torch._C.ScriptFunction):
            stack.enter_context(replaced(kind, "__call__", functions.call))
        stack.enter_context(replaced(Program, "call", functions.call_program))
        yield functions


class LoweredCalls:
    """Lowered functions by qualified name and state, for one block."""

    def __init__(self) -> None:
        self._lowered: dict[tuple[str, AmbientState], torch._C.ScriptFunction[..., Any]] = {}
        self._unit = torch._C.CompilationUnit()

    def graph(self, name: str) -> torch._C.Graph | None:
        """The body of one of the lowered functions, by its own qualified name; else None."""
        function = self._unit.find_function(name)
        return None if function is None else function.graph

    def call(
        self, original: Callable[..., Any], compiled: Compiled, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for the ``__call__`` of a compiled function or method."""
        arguments = _positional(compiled, args, kwargs)
        if arguments is None:
            return original(compiled, *args, **kwargs)  # which says what is wrong with them
        function = self._function(compiled, AmbientState.current())
        with shield():
            return _call_function(function, *arguments)

    def call_program(
        self,
        original: Callable[..., Any],
        program: Program,
        compiled: Compiled,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Stand for :meth:`Program.call`."""
        return self.call(partial(original, program), compiled, *args, **kwargs)

    def _function(
        self, compiled: Compiled, state: AmbientState
    ) -> torch._C.ScriptFunction[..., Any]:
        name = _qualified_name(compiled)
        found = self._lowered.get((name, state))
        if found is None:
            graph = _source(name, compiled).copy()
            lower_graph(graph, state, originals)
            found = self._unit.create_function(f"lowered_{len(self._lowered)}", graph)
            self._lowered[name, state] = found
        return found


_call_function = torch._C.ScriptFunction.__call__


def _source(name: str, compiled: Compiled) -> torch._C.Graph:
    """The graph as it was compiled, also of what was lowered in place since."""
    known = _python_cu.find_function(name)
    is_known = known is not None and known.graph is compiled.graph  # not one from a file
    source = originals.graph_named(name) if is_known else None
    return compiled.graph if source is None else source


def _qualified_name(compiled: Compiled) -> str:
    if isinstance(compiled, torch._C.ScriptMethod):
        owner: Any = compiled.owner
        return f"{owner._type().qualified_name()}.{compiled.name}"
    return compiled.qualified_name


def _positional(
    compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any] | None:
    """All arguments in order, the module of a method first; None if they do not fit."""
    schema: Any = compiled.schema
    parameters = schema.arguments
    values = list(args)
    if isinstance(compiled, torch._C.ScriptMethod):
        values.insert(0, compiled.owner)
    left = dict(kwargs)
    for parameter in parameters[len(values) :]:
        if parameter.name in left:
            values.append(left.pop(parameter.name))
        elif parameter.has_default_value():
            values.append(parameter.default_value)
        else:
            return None
    return None if left or len(values) > len(parameters) else values
