# mypy: allow-untyped-defs
# mypy: disable-error-code="overload-overlap"
# overload-overlap: a module is also callable; the first overload wins.
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import IO, Any, Final as Final, TypeAlias, TypeVar, overload

import torch
from torch._awaits import _Await as _Await
from torch._C import JITException as Error
from torch._jit_internal import (
    _drop as _drop,
    _IgnoreContextManager as _IgnoreContextManager,
    _isinstance as _isinstance,
    _overload as _overload,
    _overload_method as _overload_method,
    is_scripting as is_scripting,
)
from torch.futures import Future as Future
from torch.jit._await import (
    _awaitable as _awaitable,
    _awaitable_nowait as _awaitable_nowait,
    _awaitable_wait as _awaitable_wait,
)
from torch.jit._decomposition_utils import _register_decomposition as _register_decomposition
from torch.jit._freeze import run_frozen_optimizations as run_frozen_optimizations
from torch.jit._fuser import (
    fuser as fuser,
    last_executed_optimized_graph as last_executed_optimized_graph,
    optimized_execution as optimized_execution,
    set_fusion_strategy as set_fusion_strategy,
)
from torch.jit._ir_utils import _InsertPoint as _InsertPoint
from torch.jit._serialization import (
    jit_module_from_flatbuffer as jit_module_from_flatbuffer,
    save_jit_module_to_flatbuffer as save_jit_module_to_flatbuffer,
)
from torch.jit._trace import (
    ONNXTracedModule as ONNXTracedModule,
    TopLevelTracedModule as TopLevelTracedModule,
    TracedModule as TracedModule,
    TracerWarning as TracerWarning,
    TracingCheckError as TracingCheckError,
    _flatten as _flatten,
    _get_trace_graph as _get_trace_graph,
    _script_if_tracing as _script_if_tracing,
    _unique_state_dict as _unique_state_dict,
    is_tracing as is_tracing,
)
from torch.utils import set_module as set_module
from typing_extensions import ParamSpec, TypeIs

from ._script import (
    Attribute as Attribute,
    CompilationUnit as CompilationUnit,
    RecursiveScriptClass as RecursiveScriptClass,
    RecursiveScriptModule as RecursiveScriptModule,
    ScriptFunction as ScriptFunction,
    ScriptModule as ScriptModule,
    ScriptWarning as ScriptWarning,
    _ModuleWith,
    _ScriptModuleWith,
    _ScriptProfile as _ScriptProfile,
    _unwrap_optional as _unwrap_optional,
    interface as interface,
    script as script,
    script_method as script_method,
)

__all__ = [
    "Attribute",
    "CompilationUnit",
    "Error",
    "Future",
    "ScriptFunction",
    "ScriptModule",
    "annotate",
    "enable_onednn_fusion",
    "export",
    "export_opnames",
    "fork",
    "freeze",
    "ignore",
    "interface",
    "isinstance",
    "load",
    "onednn_fusion_enabled",
    "optimize_for_inference",
    "save",
    "script",
    "script_if_tracing",
    "set_fusion_strategy",
    "strict_fusion",
    "trace",
    "trace_module",
    "unused",
    "wait",
]

_T = TypeVar("_T")
_P = ParamSpec("_P")
_F = TypeVar("_F", bound=Callable[..., Any])
_FunctionOrProperty = TypeVar("_FunctionOrProperty", bound=Callable[..., Any] | property)
_ScriptModuleT = TypeVar("_ScriptModuleT", bound=ScriptModule)

# Example inputs hold tensors at any depth: a tensor, or a tuple, list or dict of more of the same.
_Examples: TypeAlias = torch.Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]

# Tracing. What is compiled already comes back as it is.

@overload
def trace(
    func: _ScriptModuleT,
    example_inputs: _Examples | None = None,
    optimize: bool | None = None,
    check_trace: bool = True,
    check_inputs: Sequence[_Examples] | None = None,
    check_tolerance: float = 1e-5,
    strict: bool = True,
    _force_outplace: bool = False,
    _module_class: type[ScriptModule] | None = None,
    _compilation_unit: torch._C.CompilationUnit = ...,
    example_kwarg_inputs: dict[str, Any] | None = None,
    _store_inputs: bool = True,
) -> _ScriptModuleT: ...
@overload
def trace(
    func: _ModuleWith[_P, _T],
    example_inputs: _Examples | None = None,
    optimize: bool | None = None,
    check_trace: bool = True,
    check_inputs: Sequence[_Examples] | None = None,
    check_tolerance: float = 1e-5,
    strict: bool = True,
    _force_outplace: bool = False,
    _module_class: type[ScriptModule] | None = None,
    _compilation_unit: torch._C.CompilationUnit = ...,
    example_kwarg_inputs: dict[str, Any] | None = None,
    _store_inputs: bool = True,
) -> ScriptModule[_P, _T]: ...

# A bound forward gives a module at run time, which is called in the same way.
@overload
def trace(
    func: Callable[_P, _T],
    example_inputs: _Examples | None = None,
    optimize: bool | None = None,
    check_trace: bool = True,
    check_inputs: Sequence[_Examples] | None = None,
    check_tolerance: float = 1e-5,
    strict: bool = True,
    _force_outplace: bool = False,
    _module_class: type[ScriptModule] | None = None,
    _compilation_unit: torch._C.CompilationUnit = ...,
    example_kwarg_inputs: dict[str, Any] | None = None,
    _store_inputs: bool = True,
) -> ScriptFunction[_P, _T]: ...
def trace_module(
    mod: _ModuleWith[_P, _T],
    inputs: dict[str, Any],
    optimize: bool | None = None,
    check_trace: bool = True,
    check_inputs: Sequence[dict[str, Any]] | None = None,
    check_tolerance: float = 1e-5,
    strict: bool = True,
    _force_outplace: bool = False,
    _module_class: type[ScriptModule] | None = None,
    _compilation_unit: torch._C.CompilationUnit = ...,
    example_inputs_is_kwarg: bool = False,
    _store_inputs: bool = True,
) -> ScriptModule[_P, _T]: ...

# Freezing

def freeze(
    mod: _ScriptModuleWith[_P, _T],
    preserved_attrs: list[str] | None = None,
    optimize_numerics: bool = True,
) -> RecursiveScriptModule[_P, _T]: ...
def optimize_for_inference(
    mod: _ScriptModuleWith[_P, _T], other_methods: list[str] | None = None
) -> RecursiveScriptModule[_P, _T]: ...

# Files

def save(
    m: ScriptModule | ScriptFunction[..., Any],
    f: str | os.PathLike[str] | IO[bytes],
    # Values may be str or bytes; a dict of either is accepted.
    _extra_files: dict[str, Any] | None = None,
) -> None: ...
def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: str | torch.device | None = None,
    # Filled in with bytes.
    _extra_files: dict[str, Any] | None = None,
    _restore_shapes: bool = False,
) -> RecursiveScriptModule: ...

# Asynchronous calls

@overload
def fork(func: _ModuleWith[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]: ...
@overload
def fork(func: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]: ...
def wait(future: Future[_T]) -> _T: ...

# Marks for the compiler

def export(fn: _F) -> _F: ...
def unused(fn: _FunctionOrProperty) -> _FunctionOrProperty: ...
@overload
def ignore(drop: _F) -> _F: ...
@overload
def ignore(drop: bool = False, *, drop_on_export: bool | None = None) -> Callable[[_F], _F]: ...
@overload
def annotate(the_type: type[_T], the_value: _T) -> _T: ...

# Optional, Union and the like are no classes to a checker, which then knows the value alone.
@overload
def annotate(the_type: object, the_value: _T) -> _T | Any: ...
@overload
def isinstance(obj: object, target_type: type[_T]) -> TypeIs[_T]: ...
@overload
def isinstance(obj: object, target_type: object) -> bool: ...

# The rest of torch.jit, under the same names.

class strict_fusion:
    def __init__(self) -> None: ...
    def __enter__(self): ...
    def __exit__(self, type: Any, value: Any, tb: Any) -> None: ...

def _hide_source_ranges() -> AbstractContextManager[None]: ...
def enable_onednn_fusion(enabled: bool) -> None: ...
def export_opnames(m: ScriptModule) -> list[str]: ...
def onednn_fusion_enabled() -> bool: ...
def script_if_tracing(fn: _F) -> _F: ...

_fork = fork
_wait = wait
_set_fusion_strategy = set_fusion_strategy
