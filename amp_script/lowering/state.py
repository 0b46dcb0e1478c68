"""The autocast state at one place in a program, known while lowering or only while running."""

from __future__ import annotations

from dataclasses import dataclass, replace

from functools import lru_cache

import torch

from ..jit_state import AmbientState
from ._graph import Value, dtype_code


@dataclass(frozen=True)
class DeviceRegion:
    """What autocast does for one device type at one place in the program.

    Attributes:
        enabled: whether it casts: known, or a ``bool`` value of the graph.
        dtype: number of the dtype it casts to, or an ``int`` value of the graph. It matters while
            disabled too, as the default of a region inside.
    """

    enabled: bool | Value
    dtype: int | Value

    @property
    def is_off(self) -> bool:
        """Whether autocast is surely off here."""
        return self.enabled is False


@dataclass(frozen=True)
class ProgramState:
    """The autocast state at one place in the program.

    Attributes:
        devices: one entry for every device type with autocast.
        cache_enabled: whether casts of leaf tensors are cached: known, or a ``bool`` value.
        outermost: the ``prim::Enter`` node of the outermost region around the place, as a number
            that is the same for all places in one such region; None outside every region.
    """

    devices: dict[str, DeviceRegion]
    cache_enabled: bool | Value
    outermost: int | None

    @classmethod
    def of(cls, ambient: AmbientState) -> ProgramState:
        """The state at the start of a program that is called in the given ambient state."""
        devices = {
            name: DeviceRegion(state.enabled, dtype_code(state.dtype))
            for name, state in ambient.devices
        }
        return cls(devices, ambient.cache_enabled, 0 if ambient.any_enabled else None)

    def active(self) -> dict[str, DeviceRegion]:
        """The device types on which autocast is on, or may be."""
        return {name: region for name, region in self.devices.items() if not region.is_off}

    def with_device(self, device_type: str, region: DeviceRegion) -> ProgramState:
        """The same state but for one device type."""
        return replace(self, devices={**self.devices, device_type: region})


@lru_cache(maxsize=None)
def supported_codes(device_type: str) -> tuple[int, ...]:
    """Numbers of the dtypes that a region on the device type may have, and stay enabled."""
    dtypes = (torch.bfloat16, torch.float16)
    if device_type == "cuda":
        dtypes += (torch.float32, torch.float64)
    return tuple(map(dtype_code, dtypes))
