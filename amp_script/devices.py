"""What a region on each device type may cast to, one row a device type.

The rows say what torch's own autocast does at construction; the differential test holds them to the
installed torch. Whether a device type has autocast at all is torch's own answer, which knows device
types that no row names.

Private names used here, tried on torch 2.6, 2.13 and 2.14: ``torch._C._is_autocast_available``,
``torch._C._get_privateuse1_backend_name``, ``torch.cuda.amp.common.amp_definitely_not_available``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["ROWS", "SETTLED", "Row", "admit", "is_autocast_available", "permits", "with_autocast"]

HALF_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Row:
    """What a region on one device type has to satisfy.

    Attributes:
        dtypes: the dtypes that operators may be cast to; None for any.
        objection: asked for each region; says why the dtype cannot be had on this machine now, or
            raises where running without autocast would be no answer. None where the dtype alone
            decides, so that a dtype once admitted need not be asked about again.
    """

    dtypes: Sequence[torch.dtype] | None = HALF_DTYPES
    objection: Callable[[torch.dtype], str | None] | None = None


def _cuda_objection(dtype: torch.dtype) -> str | None:
    if torch.cuda.amp.common.amp_definitely_not_available():  # type: ignore[no-untyped-call]  # torch's own
        return "CUDA is not available or torch_xla is imported. Disabling autocast."
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise RuntimeError(
            "Current CUDA Device does not support bfloat16. Please switch dtype to float16."
        )
    return None


def _mps_objection(dtype: torch.dtype) -> str | None:
    if dtype == torch.bfloat16 and not torch.backends.mps.is_macos_or_newer(14, 0):
        return (
            "In MPS autocast, but the target dtype torch.bfloat16 is not supported "
            "on macOS versions below 14. Disabling autocast."
        )
    return None


_MPS_ASKS_FOR_MACOS_14 = torch.__version__ < "2.10"

ROWS: dict[str, Row] = {
    "cpu": Row(),
    "cuda": Row(dtypes=None, objection=_cuda_objection),
    "xpu": Row(),
    "mps": Row(objection=_mps_objection if _MPS_ASKS_FOR_MACOS_14 else None),
    "mtia": Row(),
    "maia": Row(),
    "ipu": Row(),
    "hpu": Row(),
    "xla": Row(),
}
# Such as "cuda:1": torch admits a device with an index, and asks it for nothing but the dtype.
_UNLISTED = Row()


def is_autocast_available(device_type: str) -> bool:
    """Return whether autocast exists for ``device_type``, whether or not such a device is present.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` and so on, as in ``tensor.device.type``.

    Raises:
        RuntimeError: torch knows no device type of that name.
    """
    available: bool = torch._C._is_autocast_available(device_type)
    return available


def with_autocast() -> tuple[str, ...]:
    """Return the device types that have autocast in the installed torch, a private backend last."""
    present = tuple(name for name in ROWS if is_autocast_available(name))
    return (*present, torch._C._get_privateuse1_backend_name())


def admit(device_type: str) -> None:
    """Check that regions on ``device_type`` can be made at all, enabled or not.

    Raises:
        ValueError: ``device_type`` is no ``str``.
        RuntimeError: the device type is unknown or has no autocast.
        AssertionError: the private backend has not registered what autocast asks of it.
    """
    if not isinstance(device_type, str):
        raise ValueError(f"Expected `device_type` of type `str`, got: `{type(device_type)}`")
    if not is_autocast_available(device_type):
        raise RuntimeError(f"User specified an unsupported autocast device_type '{device_type}'")
    if device_type == torch._C._get_privateuse1_backend_name():
        _private_dtypes(device_type)


def permits(device_type: str, dtype: torch.dtype, enabled: bool, *, stacklevel: int) -> bool:
    """Return whether a region is enabled; warn if it was to be, and ``dtype`` cannot be had.

    Args:
        device_type: a device type that :func:`admit` has let through.
        dtype: the dtype that the region casts to.
        enabled: whether the region is to be enabled.
        stacklevel: whom a warning is about, counted as :func:`warnings.warn` does in the caller.

    Raises:
        RuntimeError: the device is there but cannot compute in ``dtype``.
        TypeError: ``enabled`` is no ``bool``.
    """
    if not isinstance(enabled, bool):
        raise TypeError(
            f"autocast's `enabled` must be True or False, got {enabled!r} "
            f"of type {type(enabled).__name__}"
        )
    if not enabled:
        return False
    objection = _objection(device_type, dtype)
    if objection is None:
        return True
    warnings.warn(objection, stacklevel=stacklevel + 1)
    return False


def _objection(device_type: str, dtype: torch.dtype) -> str | None:
    row, label = _row(device_type)
    if row.dtypes is not None and dtype not in row.dtypes:
        return (
            f"In {label} autocast, but the target dtype is not supported. Disabling autocast.\n"
            f"{label} Autocast only supports dtypes of {', '.join(map(str, row.dtypes))} currently."
        )
    return row.objection(dtype) if row.objection else None


def _row(device_type: str) -> tuple[Row, str]:
    if device_type == torch._C._get_privateuse1_backend_name():
        return Row(_private_dtypes(device_type)), device_type
    return ROWS.get(device_type, _UNLISTED), device_type.upper()


def _private_dtypes(backend: str) -> Sequence[torch.dtype]:
    module = getattr(torch, backend, None)
    if module is None:
        lacking = f"no module is registered as `torch.{backend}`"
    elif not hasattr(module, "get_amp_supported_dtype"):
        lacking = f"the module `torch.{backend}` has no function `get_amp_supported_dtype`"
    else:
        dtypes: Sequence[torch.dtype] = module.get_amp_supported_dtype()
        return dtypes
    raise AssertionError(
        f"Tried to use AMP with the `{backend}` backend, but {lacking}. Register a module with "
        f"`torch._register_device_module({backend!r}, module)`, and give it "
        "`get_amp_supported_dtype() -> list[torch.dtype]`."
    )


SETTLED = {
    name: row.dtypes
    for name, row in ROWS.items()
    if row.dtypes is not None and row.objection is None and is_autocast_available(name)
}
"""Device type to the dtypes that need neither :func:`admit` nor :func:`permits`, now or later."""
