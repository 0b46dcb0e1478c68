"""Lowered programs: one compiled function or method, and its variant for each ambient state.

The variant for calls outside every region is the compiled function or method itself, lowered in
place: it is what is saved, and what C++ and other scripted code call. The others are functions
beside it that take the module as their first argument, so that there is one set of parameters and
nothing to keep in step.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.CompilationUnit``,
``torch._C._get_graph_executor_optimize``, ``torch._C._set_graph_executor_optimize``,
``torch._C._functorch`` (``TransformType``, ``get_interpreter_stack``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, TypeAlias

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from ..errors import LoweringError
from ..jit_state import AmbientState, DeviceState, in_a_new_thread, shield
from ..lowering import Entry, Functions, changes, lower_prepared, python_calls
from .cast_cache import ambient_cast_cache, in_region
from .saved_tensors import raising_what_hooks_raise

__all__ = ["Compiled", "Library", "Program", "originals"]

Compiled: TypeAlias = "torch._C.ScriptFunction[..., Any] | torch._C.ScriptMethod[..., Any]"


class Library(Functions):
    """The lowered programs of one compilation unit, and the functions and methods around them.

    Of a program that is lowered in place, callers that are lowered see the body as it was before,
    so that their regions reach into it.

    Args:
        unit: the compilation unit; by default, the one that everything compiled in this process is
            in.
        around: a region around every program: its device type, and what autocast does for it.
    """

    def __init__(
        self,
        unit: torch._C.CompilationUnit | None = None,
        around: tuple[str, DeviceState] | None = None,
    ) -> None:
        super().__init__(lower_prepared, unit)
        self.programs: dict[str, Program] = {}
        self._around = around

    def add(self, name: str, compiled: Compiled) -> Program:
        """Make a program of something compiled, before its first run.

        Args:
            name: its qualified name.
            compiled: the function or method.
        """
        program = self.programs[name] = Program(self, name, compiled)
        return program

    def graph_named(self, name: str) -> torch._C.Graph | None:
        """The body of a function or method as it was compiled; None if unknown."""
        program = self.programs.get(name)
        return program.source if program else super().graph_named(name)

    def is_lowered_itself(self, name: str, entry: Entry) -> bool:
        """Whether the function or method itself is lowered for calls in a state, not a copy."""
        return name in self.programs and replace(entry, keeps_casts=True) == self.outside

    def state_inside(self, state: AmbientState) -> AmbientState:
        """The autocast state in which the programs run when they are called in a state."""
        return state if self._around is None else state.with_device(*self._around)

    @cached_property
    def outside(self) -> Entry:
        """The state in which the programs run when they are called outside every region."""
        return Entry.of(self.state_inside(_outside()), in_region=False)


class Program:
    """One compiled function or method, as it was before lowering, and its variants.

    Args:
        library: what it is a part of.
        name: its qualified name.
        compiled: the function or method; it must not have run yet.
    """

    def __init__(self, library: Library, name: str, compiled: Compiled) -> None:
        self.library = library
        self.name = name
        self.source: torch._C.Graph = compiled.graph
        self._compiled = compiled
        schema: Any = compiled.schema  # torch's stubs take it for a method
        self._parameters = schema.arguments
        self._variants: dict[
            tuple[AmbientState, bool, bool], torch._C.ScriptFunction[..., Any]
        ] = {}
        self._lock = threading.Lock()

    def lower(self) -> None:
        """Lower the compiled function or method itself, for calls outside every region."""
        contents = self.library.contents(self.name)
        entry = replace(
            self.library.outside, keeps_casts=contents.has_several_dtypes(self.library.outside)
        )
        if changes(contents, entry):
            graph = self._compiled.graph
            self.source = graph.copy()
            if contents.has_regions or entry.active:
                self.library.prepare(graph)
            self.library.lower(graph, entry)

    def lowered_graph(self, state: AmbientState) -> torch._C.Graph:
        """A copy of the program's graph, lowered for calls in an ambient state."""
        graph = self.source.copy()
        self.library.prepare(graph)
        inside = self.library.state_inside(state)
        self.library.lower(graph, Entry.of(inside, in_region=False))
        return graph

    @cached_property
    def _has_regions(self) -> bool:
        return bool(self.library.contents(self.name).has_regions or self.library.outside.active)

    @cached_property
    def _forks(self) -> bool:
        return self.library.contents(self.name).forks

    def variant(
        self, state: AmbientState, in_region: bool, recording: bool
    ) -> torch._C.ScriptFunction[..., Any]:
        """The program lowered for certain calls from Python.

        Its inputs are those of the function or method, the module first, and in a region the cast
        cache last.

        Args:
            state: the ambient state.
            in_region: whether the call is in a region, which outlasts it.
            recording: whether forks run at once, because gradients are recorded.
        """
        key = state, in_region, recording
        with self._lock:
            found = self._variants.get(key)
            if found is None:
                inside = self.library.state_inside(state)
                entry = Entry.of(inside, in_region=in_region, forks_at_once=recording)
                found = self._variants[key] = self.library.lowered(self.name, entry)
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

        Raises:
            LoweringError: the program has casts and is called inside ``torch.func.vmap``.
        """
        state = AmbientState.current()
        if _in_vmap() and (state.any_enabled or self._has_regions):
            raise LoweringError(
                f"torch.func.vmap of {self.name.removeprefix('__torch__.')}",
                "eager autocast casts inside of what vmap makes of each operator, not around it",
                advice="apply vmap to what is not scripted, or give the program a batch",
            )
        run: Callable[..., Any] = _caller(compiled)
        recording = self._forks and torch.is_grad_enabled()
        inside = in_region(state)
        if inside or recording or state != _outside():
            arguments = self.positional(compiled, args, kwargs)
            if arguments is not None:
                args, kwargs = arguments, {}
                run = self.variant(state, inside, recording)
                if inside:
                    arguments.append(ambient_cast_cache())
        optimize = torch._C._get_graph_executor_optimize()
        torch._C._set_graph_executor_optimize(False)
        try:
            with shield(), raising_what_hooks_raise(), python_calls.leaving_what_is_entered():
                return run(*args, **kwargs)
        finally:
            torch._C._set_graph_executor_optimize(optimize)

    def positional(
        self, compiled: Compiled, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Any] | None:
        """All arguments of a call in order, the module of a method first; None if they do not fit.

        Args:
            compiled: the function, or the method of the module that is called.
            args: positional arguments.
            kwargs: arguments by name.
        """
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


originals = Library()
"""The programs that are compiled in this process."""


def _in_vmap() -> bool:
    # torch's stub leaves out that there may be none.
    transforms: list[Any] | None = get_interpreter_stack()
    return transforms is not None and any(each.key() == TransformType.Vmap for each in transforms)


def _caller(compiled: Compiled) -> Callable[..., Any]:
    """What runs the compiled function or method itself, not a subclass's own call."""
    if isinstance(compiled, torch._C.ScriptMethod):
        return compiled
    return partial(torch._C.ScriptFunction.__call__, compiled)


@cache
def _outside() -> AmbientState:
    """The autocast state of a thread that has never been in a region."""
    return in_a_new_thread(AmbientState.current)
