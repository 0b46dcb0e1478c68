"""Regions entered while torch.export traces: they go into the exported program.

Non-strict export runs the Python of a model under a function mode that records what it meets. The
mode knows regions by two functions of torch's, and torch's own ``autocast`` hands them to that mode
alone. So does ours.

Private names used here, tried on torch 2.6, 2.13 and 2.14: ``_enter_autocast`` and
``_exit_autocast`` of ``torch.amp.autocast_mode``,
``torch.overrides._get_current_function_mode_stack``,
``torch.fx.experimental.proxy_tensor.PreDispatchTorchFunctionMode``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

__all__ = ["record_enter", "record_exit"]


def record_enter(device_type: str, dtype: torch.dtype, enabled: bool, cache_enabled: bool) -> None:
    """Record that a region is entered, if an export is being traced."""
    _record(_enter_autocast, (device_type, dtype, enabled, cache_enabled))


def record_exit() -> None:
    """Record that the region entered last is left, if an export is being traced."""
    _record(_exit_autocast, ())


def _record(function: Callable[..., object], args: tuple[object, ...]) -> None:
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's own
    for mode in modes:
        if isinstance(mode, PreDispatchTorchFunctionMode):
            mode.__torch_function__(function, (), args)
            return
