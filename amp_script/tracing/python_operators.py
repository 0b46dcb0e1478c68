"""Recording operators that are written in Python.

A ``torch.library.custom_op`` is one node of a trace, and no libtorch has it. While a model is
recorded its body runs as any other Python code does, so that what it consists of is recorded and
the file needs nothing but libtorch.

``torch.nn.functional.linear_cross_entropy`` leaves its chunked form, which is such an operator,
when it sees a trace; here it does not.

Private names used here, present in torch 2.6 to 2.15: ``torch._library.custom_ops.OPDEFS`` and of
its values ``_init_fn`` and ``_backend_fns``, ``torch._ops.OpOverload``,
``torch._ops.OpOverloadPacket``, ``torch.amp.autocast_mode._cast``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Final

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket
from torch.amp.autocast_mode import _cast

from amp_script.interception import replaced
from amp_script.policy.registered_casts import registered_cast_dtype
from amp_script.regions import Region
from amp_script.tracer import is_recording

__all__ = ["python_operators_as_their_bodies"]


@contextmanager
def python_operators_as_their_bodies(region: Region) -> Iterator[None]:
    """Let the calling thread record the bodies of Python operators that it calls."""
    call = partial(_call, region.device_type)
    with ExitStack() as stack:
        stack.enter_context(replaced(OpOverload, "__call__", call))
        stack.enter_context(replaced(OpOverloadPacket, "__call__", call))
        stack.enter_context(replaced(torch.jit, "is_tracing", _is_tracing))
        yield


def _call(
    device_type: str, original: Callable[..., Any], operator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Stand for the call of an operator."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    definition: Any = OPDEFS.get(packet._qualified_op_name)
    if definition is None or not is_recording():
        return original(operator, *args, **kwargs)
    bodies = definition._backend_fns
    body = bodies.get(device_type) or bodies.get(None) or definition._init_fn
    cast_to = registered_cast_dtype(device_type, packet._qualified_op_name)
    if cast_to is None or not torch.is_autocast_enabled(device_type):
        return body(*args, **kwargs)
    with torch.autocast(device_type, enabled=False):
        return body(*_cast(args, device_type, cast_to), **_cast(kwargs, device_type, cast_to))


def _is_tracing(original: Callable[[], bool]) -> bool:
    """Stand for ``torch.jit.is_tracing``, by which one function leaves a path that can be taken."""
    return sys._getframe(2).f_code not in _CHUNKED and original()


_CHUNKED: Final = frozenset(
    function.__code__
    for name, function in vars(torch.nn.functional).items()
    if "linear_cross_entropy" in name and isinstance(function, FunctionType)
)
"""What decides whether that function takes its chunked form: itself, from torch 2.15 on another."""
