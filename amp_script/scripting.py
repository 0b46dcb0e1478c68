"""``script``: compile with TorchScript, lower the autocast regions, follow the caller's autocast.

A lowered program is a set of *variants*, one for each ambient autocast state that it has been
called in. The variant for no ambient autocast is the compiled method itself, which is what is
saved, and what C++ and other scripted code call; the others are functions over the same module, so
that there is one set of parameters and nothing to keep in step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .jit_state import AmbientState, shield
from .lowering import Callees, lower_graph

__all__ = ["LoweredFunction", "LoweredModule", "script"]


@contextmanager
def _running() -> Iterator[None]:
    """Run graphs node by node as they are, in the calling thread, without autocast on top.

    TorchScript's optimising executor changes bits: it splits operators, and differentiates some by
    formulas of its own.
    """
    optimize = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        with shield():
            yield
    finally:
        torch._C._set_graph_executor_optimize(optimize)


class _Program:
    """One compiled function or method, as it was before lowering, and its variants."""

    def __init__(self, name: str, graph: torch._C.Graph) -> None:
        self.name = name
        self.source = graph.copy()
        self._unit = torch._C.CompilationUnit()
        self._variants: dict[AmbientState, torch._C.ScriptFunction] = {}

    def variant(self, state: AmbientState) -> torch._C.ScriptFunction:
        """The program lowered for an ambient state; methods take the module first."""
        found = self._variants.get(state)
        if found is None:
            graph = self.source.copy()
            lower_graph(graph, state, _Originals())
            name = f"{self.name}_{len(self._variants)}"
            found = self._variants[state] = self._unit.create_function(name, graph)
        return found


_programs: dict[str, _Program] = {}
"""Every lowered program by its qualified name, which TorchScript keeps as long as the process."""


class _Originals(Callees):
    """Finds bodies as they were before lowering, so that a caller's regions reach into them."""

    def graph_named(self, name: str) -> torch._C.Graph | None:
        program = _programs.get(name)
        return program.source if program else super().graph_named(name)


class LoweredMethod:
    """One method of a :class:`LoweredModule`, called in the variant for the caller's autocast."""

    def __init__(self, method: torch._C.ScriptMethod, program: _Program) -> None:
        self._method = method
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = AmbientState.current()
        if not state.any_enabled:
            with _running():
                return self._method(*args, **kwargs)
        variant = self._program.variant(state)
        with _running():
            return variant(self._method.owner, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)


class LoweredModule(torch.jit.RecursiveScriptModule):
    """A ScriptModule whose autocast regions are explicit casts; made by :func:`script`."""

    _disable_script_meta = True

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, torch._C.ScriptMethod):
            program = _programs.get(f"{self._c._type().qualified_name()}.{name}")
            if program is not None:
                found = self.__dict__[name] = LoweredMethod(found, program)
        return found

    def __copy__(self) -> LoweredModule:
        return _adopt(super().__copy__())

    def __deepcopy__(self, memo: Any) -> LoweredModule:
        return _adopt(super().__deepcopy__(memo))


def _adopt(module: torch.jit.RecursiveScriptModule) -> LoweredModule:
    """Make a plain ScriptModule, and all inside it, follow the caller's autocast."""
    for child in module.children():
        if type(child) is torch.jit.RecursiveScriptModule:
            _adopt(child)
    for name, value in list(module.__dict__.items()):
        if isinstance(value, torch._C.ScriptMethod):
            del module.__dict__[name]
    module.__class__ = LoweredModule
    return module


class LoweredFunction:
    """A scripted function whose autocast regions are explicit casts; made by :func:`script`."""

    def __init__(self, function: torch._C.ScriptFunction, program: _Program) -> None:
        self._function = function
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = AmbientState.current()
        function = self._program.variant(state) if state.any_enabled else self._function
        with _running():
            return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def script(obj: Any) -> Any:
    """Compile a module or function with TorchScript, autocast regions lowered to explicit casts."""
    if isinstance(obj, torch.nn.Module):
        return _script_module(obj)
    return _script_function(obj)


def _script_module(module: torch.nn.Module) -> LoweredModule:
    recursive = torch.jit._recursive
    compiled = recursive.create_script_module(
        module, recursive.infer_methods_to_compile, share_types=False
    )
    methods = {}
    for each in compiled.modules():
        for name in each._c._method_names():
            method = each._c._get_method(name)
            methods[f"{each._c._type().qualified_name()}.{name}"] = method
    fresh = {name: method for name, method in methods.items() if name not in _programs}
    for name, method in fresh.items():
        _programs[name] = _Program(name, method.graph)
    outside = AmbientState.disabled()
    for method in fresh.values():
        lower_graph(method.graph, outside, _Originals())
    return _adopt(compiled)


def _script_function(function: Callable[..., Any]) -> LoweredFunction:
    name = torch._jit_internal._qualified_name(function)
    definition = torch.jit.frontend.get_jit_def(function, function.__name__)
    names = torch._jit_internal.createResolutionCallbackFromClosure(function)
    defaults = torch.jit.frontend.get_default_args(function)
    compiled = torch._C._jit_script_compile(name, definition, names, defaults)
    program = _Program(compiled.qualified_name, compiled.graph)
    _programs[compiled.qualified_name] = program
    lower_graph(compiled.graph, AmbientState.disabled(), _Originals())
    return LoweredFunction(compiled, program)
