"""The autocast state at one place in a program, known while lowering or only while running."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..devices import ROWS
from ..jit_state import AmbientState
from ._graph import Value, dtype_code, dtypes_by_code

OFF = -1
"""The target of a device type on which autocast is off."""


@dataclass(frozen=True)
class DeviceRegion:
    """What autocast does for one device type at one place in the program.

    Attributes:
        target: number of the dtype that it casts to, or :data:`OFF`; or an ``int`` value of the
            graph with the same meaning.
        dtype: number of the dtype of the region, or a value of the graph. It matters while
            autocast is off, too, as the default of a region inside.
    """

    target: int | Value
    dtype: int | Value

    @property
    def is_off(self) -> bool:
        """Whether autocast is surely off here."""
        return isinstance(self.target, int) and self.target == OFF

    @property
    def is_on(self) -> bool:
        """Whether autocast is surely on here."""
        return isinstance(self.target, int) and self.target != OFF


@dataclass(frozen=True)
class ProgramState:
    """The autocast state at one place in the program.

    Attributes:
        devices: one entry for every device type with autocast.
        cache_enabled: whether casts of leaf tensors are cached: known, or a ``bool`` value.
        cache: the casts made so far in the outermost region around the place, a value of type
            ``Dict[Tensor, Tensor]``; None outside every region.
    """

    devices: dict[str, DeviceRegion]
    cache_enabled: bool | Value
    cache: Value | None

    @classmethod
    def of(cls, ambient: AmbientState, cache: Value | None) -> ProgramState:
        """The state at the start of a program that is called in the given ambient state."""
        devices = {}
        for name, state in ambient.devices:
            code = dtype_code(state.dtype)
            devices[name] = DeviceRegion(code if state.enabled else OFF, code)
        return cls(devices, ambient.cache_enabled, cache)

    def active(self) -> list[tuple[str, DeviceRegion]]:
        """The device types on which autocast is on, or may be."""
        return [(name, region) for name, region in self.devices.items() if not region.is_off]

    def with_device(self, device_type: str, region: DeviceRegion) -> ProgramState:
        """The same state but for one device type."""
        return replace(self, devices={**self.devices, device_type: region})


@lru_cache(maxsize=None)
def supported_codes(device_type: str) -> tuple[int, ...]:
    """Numbers of the dtypes that a region on the device type may have and stay enabled.

    Those that the device type supports, whether or not this machine has such a device: programs
    are lowered on one machine to run on others.
    """
    row = ROWS.get(device_type)
    if row is None:
        module = getattr(torch, device_type)
        return tuple(map(dtype_code, module.get_amp_supported_dtype()))
    if row.dtypes is None:
        return tuple(code for code, dtype in dtypes_by_code().items() if dtype.is_floating_point)
    return tuple(map(dtype_code, row.dtypes))
