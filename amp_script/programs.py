"""Lowered programs: one compiled function or method, and its variant for each ambient state.

The variant for no ambient autocast is the compiled function or method itself, lowered in place: it
is what is saved, and what C++ and other scripted code call. The others are functions beside it that
take the module as their first argument, so that there is one set of parameters and nothing to keep
in step.

Private names used here, present in torch 2.6 to 2.15: ````torch._C._get_graph_executor_optimize``, ``torch._C._set_graph_executor_optimize``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypeAlias

import torch

from .cast_cache import ambient_cast_cache, in_region
from .jit_state import AmbientState, shield
from .lowering import Entry, Functions, changes, lower_prepared, python_calls

Compiled: TypeAlias = "torch._C.ScriptFunction | torch._C.ScriptMethod"


class Program:
    """One compiled function or method, as it was before lowering, and its variants.

    Args:
        name: its qualified name.
        compiled: the function or method; it must not have run yet.
    """

    def __init__(self, name: str, compiled: Compiled) -> None:
        self.name = name
        self.source: torch._C.Graph = compiled.graph.copy()
        self._compiled = compiled
        self._parameters = compiled.schema.arguments
        self._variants: dict[AmbientState, torch._C.ScriptFunction] = {}
        self._lock = threading.Lock()

    def lower(self) -> None:
        """Lower the compiled function or method itself, for a call outside every region."""
        graph = self._compiled.graph
        if changes(originals.contents(self.name), outside_entry()):
            originals.prepare(graph)
            lower_prepared(graph, outside_entry(), originals)

    def variant(self, state: AmbientState) -> torch._C.ScriptFunction:
        """The program lowered for an ambient state.

        Its inputs are those of the function or method, the module first, and the cast cache last.
        """
        with self._lock:
            found = self._variants.get(state)
            if found is None:
                entry = Entry.of(state, in_region=True)
                found = self._variants[state] = originals.lowered(self.name, entry)
        return found

    def call(self, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the program in the variant for the calling thread's autocast state.

        Graphs run node by node as they are, in the calling thread and without autocast on top:
        TorchScript's optimising executor would change bits, by splitting operators and by
        derivatives of its own.

        Args:
            compiled: the function, or the method of the module that is called.
            args: positional arguments.
            kwargs: arguments by name.
        """
        state = AmbientState.current()
        run: Callable[..., Any] = _caller(compiled)
        if state != outside() or in_region(state):
            positional = self._positional(compiled, args, kwargs)
            if positional is not None:
                args, kwargs = (*positional, ambient_cast_cache()), {}
                run = self.variant(state)
        optimize = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        depth = python_calls.depth()
        try:
            with shield():
                return run(*args, **kwargs)
        finally:
            python_calls.leave_to(depth)
            torch._C._set_graph_executor_optimize(optimize)

    def _positional(
        self, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any] | None:
        """All arguments in order, the module first; None if they do not fit."""
        values = list(args)
        if isinstance(compiled, torch._C.ScriptMethod):
            values.insert(0, compiled.owner)
        left = dict(kwargs)
        for parameter in self._parameters[len(values) :]:
            if parameter.name in left:
                values.append(left.pop(parameter.name))
            elif parameter.has_default_value():
                values.append(parameter.default_value)
            else:
                return None
        return None if left or len(values) > len(self._parameters) else values


def _caller(compiled: Compiled) -> Callable[..., Any]:
    """What runs the compiled function or method itself, not a subclass's own call."""
    if isinstance(compiled, torch._C.ScriptMethod):
        return compiled
    return partial(torch._C.ScriptFunction.__call__, compiled)


programs: dict[str, Program] = {}
"""Every lowered program by its qualified name, which TorchScript keeps as long as the process."""


def add_program(name: str, compiled: Compiled) -> Program:
    """Make a program of something compiled, before its first run."""
    program = programs[name] = Program(name, compiled)
    return program


class _Functions(Functions):
    """All functions of the process; of those that are lowered in place, as they were before."""

    def graph_named(self, name: str) -> torch._C.Graph | None:
        program = programs.get(name)
        return program.source if program else super().graph_named(name)

    def is_lowered_itself(self, name: str, entry: Entry) -> bool:
        return name in programs and entry == outside_entry()


originals = _Functions(lower_prepared)


@lru_cache(maxsize=1)
def outside() -> AmbientState:
    """The autocast state of a thread that has never been in a region."""
    found: list[AmbientState] = []
    thread = threading.Thread(target=lambda: found.append(AmbientState.current()))
    thread.start()
    thread.join()
    return found[0]


@lru_cache(maxsize=1)
def outside_entry() -> Entry:
    """The state of a program that is called outside every region."""
    return Entry.of(outside(), in_region=False)
