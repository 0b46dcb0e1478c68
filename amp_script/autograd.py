"""custom_fwd and custom_bwd: autocast in the forward and backward of custom autograd functions.

The forward records the autocast state that it runs in, the backward runs in that state. The record
lies on the context of the call, under torch's names, so that ours and torch's may be mixed.

A ``forward(ctx, ...)`` is given the context. Where a function has a ``setup_context`` the forward
is not, and torch's decorator puts the record on the first input instead. Ours has the
``setup_context`` make it, which is called next and in the same state. The function of a
``torch.library.custom_op`` finds the context in the frame that torch calls the operator from.

Private names used here, tried on torch 2.6, 2.13 and 2.14: the attributes ``_dtype`` and
``_fwd_used_autocast`` of contexts, and the variable ``ctx`` in ``torch._library.autograd``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Protocol, TypeVar, overload

import torch
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from typing_extensions import TypeIs

from amp_script.errors import CustomFunctionError

__all__ = ["custom_bwd", "custom_fwd"]

try:
    from numpy import ndarray
except ModuleNotFoundError:
    _WHOLE: tuple[type, ...] = (str, bytes)
else:
    _WHOLE = (str, bytes, ndarray)

Function = Callable[..., object]
F = TypeVar("F", bound=Function)


class _Context(Protocol):
    """A context, with the record that lies on it."""

    _dtype: torch.dtype
    _fwd_used_autocast: bool


@overload
def custom_fwd(fwd: F, *, device_type: str, cast_inputs: torch.dtype | None = None) -> F: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> Callable[[F], F]: ...
def custom_fwd(
    fwd: Function | None = None, *, device_type: str, cast_inputs: torch.dtype | None = None
) -> object:
    """Decorate the ``forward`` of a custom autograd function, for :func:`custom_bwd` to follow.

    It may also decorate the function of a ``torch.library.custom_op``, and a ``setup_context``,
    which needs it only where its function's forward is traced and not run: in ``torch.compile``.

    Args:
        fwd: the function, or None to be given it by a second call.
        device_type: the device type whose autocast state is recorded.
        cast_inputs: if given, and autocast is on, the forward runs with autocast off, and on inputs
            cast to this dtype: floating-point tensors on the device but for float64, also in
            nested tuples, lists and mappings.

    Raises:
        ValueError: ``device_type`` is no ``str``.
    """
    _check(device_type)
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    body = sys._getframe(1)
    if _is_class_body(body):
        record = _RecordInSetupContext(device_type, cast_inputs)
        body.f_locals.setdefault("_record_autocast_in_setup_context", record)

    @functools.wraps(fwd)
    def decorated(*args: object, **kwargs: object) -> object:
        enabled = torch.is_autocast_enabled(device_type)
        context = args[0] if args else kwargs.get("ctx")
        if _is_context(context):
            _record(context, device_type, cast_inputs)
        elif not is_dynamo_compiling():
            _record_for_operator(sys._getframe(1), device_type, cast_inputs)
        if not enabled or cast_inputs is None:
            return fwd(*args, **kwargs)
        with torch.autocast(device_type, enabled=False):
            return fwd(
                *(_cast(value, device_type, cast_inputs) for value in args),
                **{name: _cast(value, device_type, cast_inputs) for name, value in kwargs.items()},
            )

    return decorated


@overload
def custom_bwd(bwd: F, *, device_type: str) -> F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str) -> Callable[[F], F]: ...
def custom_bwd(bwd: Function | None = None, *, device_type: str) -> object:
    """Decorate the ``backward`` of a custom autograd function, to run as its forward did.

    Args:
        bwd: the function, or None to be given it by a second call.
        device_type: the device type that :func:`custom_fwd` was given.

    Raises:
        ValueError: ``device_type`` is no ``str``.
        CustomFunctionError: when the backward runs, and no forward has recorded its state.
    """
    _check(device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def decorated(*args: object, **kwargs: object) -> object:
        context = args[0]
        if not _has_record(context):
            raise CustomFunctionError(bwd.__qualname__)
        enabled, dtype = context._fwd_used_autocast, context._dtype
        with torch.autocast(device_type, enabled=enabled, dtype=dtype):
            return bwd(*args, **kwargs)

    return decorated


def _check(device_type: object) -> None:
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")


def _is_context(value: object) -> TypeIs[_Context]:
    return isinstance(value, FunctionCtx) or hasattr(value, "save_for_backward")


def _has_record(value: object) -> TypeIs[_Context]:
    return getattr(value, "_fwd_used_autocast", None) is not None


def _record(context: _Context, device_type: str, cast_inputs: torch.dtype | None) -> None:
    """Record on a context the state that its forward runs in: off, if its inputs are cast."""
    enabled = torch.is_autocast_enabled(device_type)
    context._dtype = torch.get_autocast_dtype(device_type)
    context._fwd_used_autocast = enabled and cast_inputs is None


def _record_for_operator(
    frame: FrameType | None, device_type: str, cast_inputs: torch.dtype | None
) -> None:
    """Record the state on the context of the ``torch.library.custom_op`` that is called, if any.

    Args:
        frame: what calls the operator's function; only torch's own frames are looked through.
        device_type: see :func:`custom_fwd`.
        cast_inputs: see :func:`custom_fwd`.
    """
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch."):
        context = frame.f_locals.get("ctx")
        if _is_context(context):
            _record(context, device_type, cast_inputs)
            return
        frame = frame.f_back


_SETUP = "setup_context"


class _RecordInSetupContext:
    """Put into the body of a class, has its ``setup_context`` record the state."""

    def __init__(self, device_type: str, cast_inputs: torch.dtype | None) -> None:
        self._arguments = device_type, cast_inputs

    def __set_name__(self, function: type, name: str) -> None:
        """Decorate the ``setup_context`` of a class that was just made, and leave nothing else."""
        delattr(function, name)
        setup_context = getattr(function, _SETUP, None)
        if setup_context not in (None, torch.autograd.Function.setup_context):
            recording = _recording(setup_context, *self._arguments)
            setattr(function, _SETUP, staticmethod(recording))


def _recording(
    setup_context: Function, device_type: str, cast_inputs: torch.dtype | None
) -> Function:
    @functools.wraps(setup_context)
    def recording(ctx: _Context, inputs: object, output: object) -> object:
        _record(ctx, device_type, cast_inputs)
        return setup_context(ctx, inputs, output)

    return recording


def _is_class_body(frame: FrameType) -> bool:
    return frame.f_locals is not frame.f_globals and "__qualname__" in frame.f_locals


def _cast(value: object, device_type: str, dtype: torch.dtype) -> object:
    """Return ``value`` with its eligible tensors cast, however deep they lie in containers.

    A tuple or list keeps its type, a mapping becomes a dict, and another iterable is iterated over,
    as torch does it.
    """
    if isinstance(value, torch.Tensor):
        eligible = (
            value.is_floating_point()
            and value.device.type == device_type
            and value.dtype is not torch.float64
        )
        return value.to(dtype) if eligible else value
    if isinstance(value, _WHOLE):
        return value
    if isinstance(value, Mapping):
        return {
            _cast(key, device_type, dtype): _cast(item, device_type, dtype)
            for key, item in value.items()
        }
    if isinstance(value, Iterable):
        items = (_cast(item, device_type, dtype) for item in value)
        if isinstance(value, tuple):
            return getattr(value, "_make", type(value))(items)
        return type(value)(items) if isinstance(value, list) else items
    return value
