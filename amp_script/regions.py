"""The autocast region that a program is made for, and the dtypes at its border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from amp_script.errors import TracingError

__all__ = ["Region", "border_dtype"]

_LOWER_PRECISION: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Region:
    """Device type and dtype of a region.

    Attributes:
        device_type: device type whose operators are cast.
        dtype: bfloat16 or float16.
    """

    device_type: str
    dtype: torch.dtype

    @classmethod
    def resolve(cls, device_type: str, dtype: torch.dtype | None) -> Region:
        """Fill in the device's default dtype.

        Raises:
            TracingError: the device type has no autocast, or not in this dtype.
        """
        if not torch.amp.is_autocast_available(device_type):
            raise TracingError(f"no autocast on device type {device_type!r}")
        chosen = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        if chosen not in _LOWER_PRECISION:
            raise TracingError(
                f"autocast on {device_type!r} does not support {chosen}; use one of "
                + ", ".join(map(str, _LOWER_PRECISION))
            )
        return cls(device_type, chosen)

    def enter(self) -> torch.autocast:
        """A context for one run, without the cache, whose casts a trace cannot hold."""
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=False)


def border_dtype(inside: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype of a tensor at the border: the one asked for, where the tensor is floating point."""
    return wanted if wanted is not None and inside.is_floating_point else inside
