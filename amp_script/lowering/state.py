"""The autocast state at one place in a program, known while lowering or only while running."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from ..devices import ROWS
from ..jit_state import AmbientState
from ._graph import Editor, Value, cast_cache_type, dtype_code, dtypes_by_code

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
        keeps_casts, forks_at_once: see :class:`Entry`.
    """

    devices: dict[str, DeviceRegion]
    cache_enabled: bool | Value
    cache: Value | None
    keeps_casts: bool
    forks_at_once: bool

    def active(self) -> list[tuple[str, DeviceRegion]]:
        """The device types on which autocast is on, or may be."""
        return [(name, region) for name, region in self.devices.items() if not region.is_off]

    def with_device(self, device_type: str, region: DeviceRegion) -> ProgramState:
        """The same state but for one device type."""
        return replace(self, devices={**self.devices, device_type: region})

    def entry(self) -> tuple[Entry, list[Value]]:
        """The state as a key, for lowering what is called in it, and the values it leaves open."""
        open_values: list[Value] = []

        def known(item: int | bool | Value) -> int | bool | None:
            if isinstance(item, Value):
                open_values.append(item)
                return None
            return item

        devices = tuple(
            (name, known(region.target), known(region.dtype))
            for name, region in self.devices.items()
        )
        cache_enabled = known(self.cache_enabled)
        if self.cache is not None:
            open_values.append(self.cache)
        assert not isinstance(cache_enabled, int) or isinstance(cache_enabled, bool)
        in_region = self.cache is not None
        entry = Entry(devices, cache_enabled, in_region, self.keeps_casts, self.forks_at_once)
        return entry, open_values


@dataclass(frozen=True)
class Entry:
    """The autocast state in which something is called, as far as it is known while lowering.

    Attributes:
        devices: for each device type with autocast its name, target and dtype, as in
            :class:`DeviceRegion`, but None for what the caller gives as an argument.
        cache_enabled: whether casts of leaf tensors are cached; None if the caller gives it.
        in_region: whether the caller gives the casts made so far in the outermost region.
        keeps_casts: whether a cast of a leaf tensor is kept in the cache where no gradients are
            recorded and it is used once: it may be used again, by a later call in the caller's
            region, or in a region of another dtype, which the cache does not tell apart.
        forks_at_once: whether forks run at once, because gradients are recorded.
    """

    devices: tuple[tuple[str, int | None, int | None], ...]
    cache_enabled: bool | None
    in_region: bool
    keeps_casts: bool
    forks_at_once: bool

    @classmethod
    def of(
        cls,
        ambient: AmbientState,
        *,
        in_region: bool,
        keeps_casts: bool = True,
        forks_at_once: bool = False,
    ) -> Entry:
        """The entry of a program that Python code calls in the given ambient state."""
        devices = tuple(
            (name, dtype_code(state.dtype) if state.enabled else OFF, dtype_code(state.dtype))
            for name, state in ambient.devices
        )
        return cls(devices, ambient.cache_enabled, in_region, keeps_casts, forks_at_once)

    @property
    def active(self) -> tuple[str, ...]:
        """The device types on which autocast is on, or may be."""
        return tuple(name for name, target, _ in self.devices if target != OFF)

    def start(self, editor: Editor) -> ProgramState:
        """The state at the start of a graph, which gets inputs for what is not known."""

        def item(known: int | None, name: str) -> int | Value:
            return editor.add_input(name, torch._C.IntType.get()) if known is None else known

        devices = {
            name: DeviceRegion(item(target, f"{name}_target"), item(dtype, f"{name}_dtype"))
            for name, target, dtype in self.devices
        }
        cache_enabled: bool | Value
        if self.cache_enabled is None:
            cache_enabled = editor.add_input("cache_enabled", torch._C.BoolType.get())
        else:
            cache_enabled = self.cache_enabled
        cache: Value | None = None
        if self.in_region:
            cache = editor.add_input("cast_cache", cast_cache_type())
        elif self.active:
            cache = editor.cast_cache_before(editor.first())
        return ProgramState(devices, cache_enabled, cache, self.keeps_casts, self.forks_at_once)


@cache
def supported_codes(device_type: str) -> tuple[int, ...]:
    """Numbers of the dtypes that a region on the device type may have and stay enabled.

    Those that the device type supports, whether or not this machine has such a device: programs
    are lowered on one machine to run on others.
    """
    row = ROWS.get(device_type)
    if row is None:
        ask = getattr(getattr(torch, device_type, None), "get_amp_supported_dtype", tuple)
        return tuple(map(dtype_code, ask()))
    if row.dtypes is None:
        return tuple(code for code, dtype in dtypes_by_code().items() if dtype.is_floating_point)
    return tuple(map(dtype_code, row.dtypes))
