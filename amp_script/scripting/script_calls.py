"""Scripted functions and modules that eager code calls, lowered for the state they are called in.

A model may hold TorchScript: a submodule, a function, what ``torch.jit.script_if_tracing`` compiles
on the way. Its graph is executed without the casts and regions that a trace or an eager run should
see. Inside :func:`lowered_script_calls` each call runs, and records, the graph lowered for the
calling thread's autocast state.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ScriptMethod``,
``torch._C.ScriptFunction``, ``torch._C.CompilationUnit``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from amp_script.interception import replaced
from amp_script.jit_state import AmbientState, shield
from amp_script.scripting.programs import Compiled, Library, Program, originals
from amp_script.tracer import recording_paused

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
    """Lowered functions by program and state, for one block."""

    def __init__(self) -> None:
        self._lowered: dict[tuple[Program, AmbientState], torch._C.ScriptFunction[..., Any]] = {}
        self._programs: dict[int, tuple[torch._C.Graph, Program]] = {}
        self._unit = torch._C.CompilationUnit()

    def graph(self, name: str) -> torch._C.Graph | None:
        """The body of one of the lowered functions, by its own qualified name; else None."""
        function = self._unit.find_function(name)
        return None if function is None else function.graph

    def call(
        self, original: Callable[..., object], compiled: Compiled, *args: object, **kwargs: object
    ) -> object:
        """Stand for the ``__call__`` of a compiled function or method."""
        as_it_is = partial(original, compiled, *args, **kwargs)
        return self._call(as_it_is, self._program(compiled), compiled, args, kwargs)

    def call_program(
        self,
        original: Callable[..., object],
        program: Program,
        compiled: Compiled,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        """Stand for :meth:`Program.call`."""
        as_it_is = partial(original, program, compiled, args, kwargs)
        return self._call(as_it_is, program, compiled, args, kwargs)

    def _call(
        self,
        as_it_is: Callable[[], object],
        program: Program,
        compiled: Compiled,
        args: Sequence[object],
        kwargs: Mapping[str, object],
    ) -> object:
        arguments = program.positional(compiled, args, kwargs)
        if arguments is None:
            return as_it_is()  # which says what is wrong with them
        key = program, AmbientState.current()
        function = self._lowered.get(key)
        if function is None:
            with recording_paused():  # passes run operators to fold them
                graph = program.lowered_graph(key[1])
            function = self._unit.create_function(f"lowered_{len(self._lowered)}", graph)
            self._lowered[key] = function
        with shield():
            return _call_function(function, *arguments)

    def _program(self, compiled: Compiled) -> Program:
        """A program of what is compiled already."""
        graph = compiled.graph
        if id(graph) not in self._programs:
            library, name, owner = originals, str(compiled.name), getattr(compiled, "owner", None)
            if owner is not None:
                # What it calls may be from a file, whose types may have names of types in here.
                library, name = Library(), f"{owner._type().qualified_name()}.{name}"
                library.learn(owner)
            self._programs[id(graph)] = graph, Program(library, name, compiled)
        return self._programs[id(graph)][1]


_call_function = torch._C.ScriptFunction.__call__
