"""The autocast region that a program is made for, and the dtypes at its border."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import torch

from amp_script.dtypes import require_dtype
from amp_script.errors import TracingError
from amp_script.jit_state import AmbientState, DeviceState

__all__ = ["Region", "border_dtype"]


@dataclass(frozen=True)
class Region:
    """Device type and dtype of a region.

    Attributes:
        device_type: device type whose operators are cast.
        dtype: what operators are cast to.
    """

    device_type: str
    dtype: torch.dtype

    @classmethod
    def resolve(cls, device_type: str, dtype: torch.dtype | None) -> Region:
        """Fill in the device's default dtype.

        Raises:
            TracingError: the device type has no autocast, or not in this dtype.
            ArgumentError: ``dtype`` is no dtype.
        """
        require_dtype("dtype", dtype)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                region = torch.autocast(device_type, dtype=dtype)
        except (ValueError, RuntimeError, AssertionError, UserWarning) as error:
            # A warning of torch's says that it goes on without autocast.
            reason = " ".join(str(error).replace("Disabling autocast.", "").split())
            raise TracingError(f"no autocast on {device_type!r} in {dtype}: {reason}") from None
        return cls(device_type, region.fast_dtype)

    def ambient(self) -> AmbientState:
        """The thread's autocast state as it is in :meth:`enter`."""
        outside = replace(AmbientState.disabled(), cache_enabled=False)
        return outside.with_device(self.device_type, DeviceState(enabled=True, dtype=self.dtype))

    def enter(self, *, cached: bool = False) -> torch.autocast:
        """A context for one run.

        Args:
            cached: whether casts of weights are kept, as by default in eager mode. A trace cannot
                hold such casts.
        """
        return torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=cached)


def border_dtype(inside: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Dtype of a tensor at the border: the one asked for, where the tensor is floating point."""
    return wanted if wanted is not None and inside.is_floating_point else inside
