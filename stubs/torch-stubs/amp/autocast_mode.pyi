# mypy: allow-untyped-defs, allow-incomplete-defs
# Private functions are as torch has them: untyped.
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, TypeVar, overload

from torch import dtype as _dtype
from typing_extensions import Self

__all__ = ["autocast", "autocast_decorator", "custom_bwd", "custom_fwd", "is_autocast_available"]

# A decorator that gives back the type it got keeps everything: overloads, methods, generators.
_F = TypeVar("_F", bound=Callable[..., Any])

HAS_NUMPY: bool

def is_autocast_available(device_type: str) -> bool: ...
def autocast_decorator(autocast_instance: autocast, func: _F) -> _F: ...

class autocast:
    device: str
    fast_dtype: _dtype
    custom_backend_name: str
    custom_device_mod: ModuleType
    prev: bool
    prev_cache_enabled: bool
    prev_fastdtype: _dtype
    _enabled: bool
    _cache_enabled: bool
    def __init__(
        self,
        device_type: str,
        dtype: _dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None: ...
    def __enter__(self) -> Self: ...
    # Never true: a checker that saw bool here would take every exception to be swallowed.
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Literal[False] | None: ...
    def __call__(self, func: _F) -> _F: ...

class _UnmanagedAutocast(autocast): ...

def _enter_autocast(*vals): ...
def _exit_autocast(mode): ...
def _cast(value, device_type: str, dtype: _dtype): ...
@overload
def custom_fwd(fwd: _F, *, device_type: str, cast_inputs: _dtype | None = None) -> _F: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: _dtype | None = None
) -> Callable[[_F], _F]: ...
@overload
def custom_bwd(bwd: _F, *, device_type: str) -> _F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[_F], _F]: ...
