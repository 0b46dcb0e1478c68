"""Compiling with TorchScript so that what comes out can be lowered.

Five things are different from ``torch.jit.script``, for the calling thread and while it compiles:

- **Types.** TorchScript keeps one type for all modules that look alike, with one body for each
  method, in a table for the whole process. A module whose methods are changed after they were
  compiled must not share them with others, or a later plain ``torch.jit.script`` of the same class
  would get the changed ones. Its own parts share theirs, or a model of twelve equal layers would be
  compiled twelve times.
- **Decorators.** TorchScript compiles the source that a decorator was put on, and so drops
  ``@torch.autocast(...)``. Wherever it comes upon such a function it is given one in its place that
  has the region in its source; those decorated with this library's autocast have it already.
- **Interfaces.** A submodule that is annotated with a ``torch.jit.interface`` gets its own type,
  which is the interface's too, so that what is called in a region is known. Another submodule of
  another type cannot be put in its place afterwards: TorchScript refuses it.
- **Custom functions.** Calls of custom autograd functions are compiled, which torch from 2.14 on
  refuses; see :mod:`amp_script.scripting.custom_functions`.
- **Early exits.** ``with`` blocks are compiled as marks, of which regions are made afterwards; see
  :mod:`amp_script.scripting.early_exits`.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._recursive``
(``ConcreteTypeStore``, ``concrete_type_store``, ``create_hooks_from_stubs``,
``create_methods_and_properties_from_stubs``, ``create_script_module``, ``get_annotations``,
``infer_methods_to_compile``, ``make_stub``, ``make_stubs_for_overloads``, ``try_compile_fn``),
``torch.jit._script._compile_function_with_overload``, ``torch._C._jit_script_compile`` with
``_overload`` and ``_jit_script_class_compile``,
``torch._jit_internal`` (``createResolutionCallbackFromClosure``, ``_qualified_name``),
``torch.jit.frontend`` (``get_jit_def``, ``get_default_args``, ``parse_def``),
``torch.jit._state._python_cu``, ``torch._C.CompilationUnit.find_function``.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._jit_internal import _qualified_name, createResolutionCallbackFromClosure
from torch.amp.autocast_mode import autocast_decorator
from torch.jit import _recursive, _script, frontend
from torch.jit._script import RecursiveScriptModule
from torch.jit._state import _python_cu
from torch.jit.frontend import get_default_args, get_jit_def

from ..interception import replaced
from ..twin import decorate_function
from ..undeprecated import compiling_quietly
from .custom_functions import custom_functions_compiled
from .early_exits import nest_regions, with_marks

__all__ = ["compile_function", "compile_module", "compiling"]

_lock = threading.RLock()

# Torch's own, untyped.
_create_script_module: Any = _recursive.create_script_module
_get_default_args: Any = get_default_args
_get_jit_def: Any = get_jit_def
_decorator: Any = autocast_decorator


def compile_module(module: torch.nn.Module) -> RecursiveScriptModule:
    """Do what ``torch.jit.script(module)`` does, as the text above says."""
    with compiling():
        compiled: RecursiveScriptModule = _create_script_module(
            module, _recursive.infer_methods_to_compile
        )
    return compiled


def compile_function(function: Callable[..., Any]) -> torch._C.ScriptFunction[..., Any]:
    """Do what ``torch.jit.script(function)`` does, as the text above says, and compile it anew.

    Raises:
        RuntimeError: TorchScript does not compile what a decorator made of the function.
    """
    if hasattr(function, "__script_if_tracing_wrapper"):
        function = getattr(function, "__original_fn")  # mypy knows no such attribute
    function = _with_region(function)
    if hasattr(function, "__script_unsupported"):
        raise RuntimeError(f"TorchScript error: {function.__script_unsupported}")
    with compiling():
        compiled: torch._C.ScriptFunction[..., Any] = torch._C._jit_script_compile(
            _qualified_name(function),
            _get_jit_def(function, function.__name__),
            createResolutionCallbackFromClosure(function),
            _get_default_args(function),
        )
    return compiled


@contextmanager
def compiling() -> Iterator[None]:
    """Let TorchScript compile, in the calling thread, as the text above says."""
    with (
        _lock,
        _types_of_its_own(),
        custom_functions_compiled(),
        compiling_quietly(),
        replaced(_recursive, "get_annotations", _without_interfaces),
        replaced(_recursive, "make_stub", _make_stub),
        replaced(_recursive, "make_stubs_for_overloads", _make_stubs_for_overloads),
        replaced(_recursive, "try_compile_fn", _try_compile_fn),
        replaced(_script, "_compile_function_with_overload", _compile_function_with_overload),
        replaced(frontend, "parse_def", _parse_def),
        replaced(torch._C, "_jit_script_compile", _define_function),
        replaced(torch._C, "_jit_script_compile_overload", _define_function),
        replaced(torch._C, "_jit_script_class_compile", _define_class),
        replaced(_recursive, "create_methods_and_properties_from_stubs", _define_methods),
        replaced(_recursive, "create_hooks_from_stubs", _define_hooks),
    ):
        yield


# Types --------------------------------------------------------------------------------------------


class _OneThreadsTypes(_recursive.ConcreteTypeStore):
    """Types for what one thread compiles; other threads keep the process's table."""

    def __init__(self, others: _recursive.ConcreteTypeStore) -> None:
        self._own = _recursive.ConcreteTypeStore()
        self._others = others
        self._thread = threading.get_ident()

    def _store(self) -> _recursive.ConcreteTypeStore:
        return self._own if threading.get_ident() == self._thread else self._others

    @property
    def type_store(self) -> Any:  # type: ignore[override]  # an attribute there
        return self._store().type_store

    @property
    def methods_compiled(self) -> Any:  # type: ignore[override]  # an attribute there
        return self._store().methods_compiled

    def get_or_create_concrete_type(self, nn_module: torch.nn.Module) -> Any:
        store: Any = self._store()
        return store.get_or_create_concrete_type(nn_module)


@contextmanager
def _types_of_its_own() -> Iterator[None]:
    before = _recursive.concrete_type_store
    _recursive.concrete_type_store = _OneThreadsTypes(before)
    try:
        yield
    finally:
        _recursive.concrete_type_store = before


def _without_interfaces(original: Callable[..., Any], module: object) -> dict[str, Any]:
    """Hide from TorchScript which submodules are annotated with interfaces."""
    annotations: dict[str, Any] = original(module)
    return {name: kind for name, kind in annotations.items() if not _is_interface(kind)}


def _is_interface(annotation: object) -> bool:
    return hasattr(annotation, "__torch_script_interface__")


# Decorators ---------------------------------------------------------------------------------------

_WRAPPER_CODE = _decorator(None, lambda: None).__code__

_converted: WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = WeakKeyDictionary()


def _with_region(function: Any) -> Any:
    """What to compile for a function: itself, unless torch's autocast decorates it."""
    if isinstance(function, types.MethodType):
        converted = _with_region(function.__func__)
        return types.MethodType(converted, function.__self__)
    if getattr(function, "__code__", None) is not _WRAPPER_CODE:
        return function
    if function not in _converted:
        cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
        inside = {name: cell.cell_contents for name, cell in cells}
        region, decorated = inside["autocast_instance"], inside["func"]
        _converted[function] = decorate_function(region, _with_region(decorated))
    return _converted[function]


def _make_stub(original: Callable[..., Any], func: Any, name: str) -> Any:
    return original(_with_region(func), name)


def _try_compile_fn(original: Callable[..., Any], fn: Any, loc: Any) -> Any:
    return original(_with_region(fn), loc)


def _make_stubs_for_overloads(original: Callable[..., Any], overloads: dict[Any, Any]) -> Any:
    return original({_with_region(function): each for function, each in overloads.items()})


def _compile_function_with_overload(
    original: Callable[..., Any], overload: Any, name: str, implementation: Any
) -> Any:
    return original(overload, name, _with_region(implementation))


# Early exits --------------------------------------------------------------------------------------

_unit: Any = _python_cu


def _parse_def(original: Callable[..., Any], fn: Any) -> Any:
    parsed = original(fn)
    return parsed._replace(ast=with_marks(parsed.ast))


def _define_function(original: Callable[..., Any], *args: Any) -> Any:
    function = original(*args)
    nest_regions(function.graph)
    return function


def _define_class(original: Callable[..., Any], *args: Any) -> Any:
    type_ = original(*args)
    _nest_in(type_, type_.method_names())
    return type_


def _define_methods(
    original: Callable[..., Any], concrete_type: Any, methods: Any, properties: Any
) -> None:
    # Not all that the type has by now: a method that is called here first is defined while the one
    # that calls it is half made.
    original(concrete_type, methods, properties)
    accessors = [name for stub in properties for name in _accessors(stub.def_)]
    _nest_in(concrete_type.jit_type, [*(stub.def_.name().name for stub in methods), *accessors])


def _accessors(definition: Any) -> list[str]:
    names = definition.getter_name(), definition.setter_name()
    return [name.name for name in names if name is not None]


def _define_hooks(original: Callable[..., Any], concrete_type: Any, *stubs: Any) -> None:
    original(concrete_type, *stubs)
    _nest_in(concrete_type.jit_type, [hook.def_.name().name for hook in chain(*stubs)])


def _nest_in(type_: Any, methods: Iterable[str]) -> None:
    for method in methods:
        nest_regions(_unit.find_function(f"{type_.qualified_name()}.{method}").graph)
