"""What decides the casts around a call: autocast's state and TorchScript's pass flag.

Autocast has two switches besides the regions themselves. The *ambient state* belongs to a thread:
for every device type, whether autocast is on and in which dtype. The *JIT pass flag* belongs to the
process: whether TorchScript's own autocast pass rewrites a graph before its first run.
This module reads the first as a value, sets the second and puts it back, and shields a call from
both.

Private names used here, tried on torch 2.6, 2.13 and 2.14: ``torch._C._jit_set_autocast_mode``,
``torch._C._DisableAutocast``, ``torch._C._get_privateuse1_backend_name``,
``torch._C._dispatch_tls_local_exclude_set``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import torch

from amp_script.devices import with_autocast as devices_with_autocast
from amp_script.errors import ArgumentError

__all__ = ["AmbientState", "DeviceState", "in_a_new_thread", "jit_autocast_pass", "shield"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeviceState:
    """Autocast's state for one device type.

    Attributes:
        enabled: whether operators on the device are cast.
        dtype: the dtype that they are cast to, and the default of a region that names none.
    """

    enabled: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AmbientState:
    """The autocast state of a thread, as a hashable value.

    Attributes:
        devices: a pair of device type and state for every device type that has autocast.
            A private backend stands last, under its present name.
        cache_enabled: whether casts of leaf tensors are cached in a region.
    """

    devices: tuple[tuple[str, DeviceState], ...]
    cache_enabled: bool
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Hash once: a state is looked up on every call of a scripted module."""
        object.__setattr__(self, "_hash", hash((self.devices, self.cache_enabled)))

    def __hash__(self) -> int:
        """Return the hash taken when the state was made."""
        return self._hash

    def __reduce__(self) -> tuple[type[AmbientState], tuple[object, ...]]:
        """Pickle without the hash, which another process would compute differently."""
        return AmbientState, (self.devices, self.cache_enabled)

    @classmethod
    def current(cls) -> AmbientState:
        """Return the calling thread's state, in about two microseconds."""
        private_backend = torch._C._get_privateuse1_backend_name()
        return _remembered(
            private_backend,
            tuple(map(torch.get_autocast_dtype, _device_types(private_backend))),
            torch.is_autocast_cache_enabled(),
            torch._C._dispatch_tls_local_exclude_set().raw_repr(),
        )

    @classmethod
    def disabled(cls) -> AmbientState:
        """Return the calling thread's state with autocast off on every device.

        The dtypes stay, because a region that names no dtype takes them.
        """
        now = cls.current()
        if not now.any_enabled:
            return now
        off = tuple((name, DeviceState(False, state.dtype)) for name, state in now.devices)
        return replace(now, devices=off)

    @property
    def any_enabled(self) -> bool:
        """Whether autocast is on for some device type."""
        return any(state.enabled for _, state in self.devices)

    def device(self, device_type: str) -> DeviceState:
        """Return the state of one device type.

        Raises:
            KeyError: the device type has no autocast.
        """
        for name, state in self.devices:
            if name == device_type:
                return state
        raise KeyError(
            f"no autocast on device type {device_type!r}; device types that have it: "
            + ", ".join(name for name, _ in self.devices)
        )

    def with_device(self, device_type: str, state: DeviceState) -> AmbientState:
        """Return the same state but for one device type.

        Raises:
            KeyError: the device type has no autocast.
        """
        self.device(device_type)
        return replace(
            self,
            devices=tuple(
                (name, state if name == device_type else before) for name, before in self.devices
            ),
        )


@lru_cache(maxsize=2)
def _device_types(private_backend: str) -> tuple[str, ...]:
    """Return them for a name of the private backend, which a program may change once."""
    del private_backend
    return devices_with_autocast()


@lru_cache(maxsize=256)
def _remembered(
    private_backend: str,
    dtypes: tuple[torch.dtype, ...],
    cache_enabled: bool,
    excluded_dispatch_keys: int,
) -> AmbientState:
    """Build the calling thread's state, or return the one built before.

    Autocast is on for a device while its dispatch key is not excluded, so the set of excluded keys,
    read in one call, stands for one answer a device and need only tell states apart here.
    """
    del excluded_dispatch_keys
    devices = tuple(
        (name, DeviceState(torch.is_autocast_enabled(name), dtype))
        for name, dtype in zip(_device_types(private_backend), dtypes, strict=True)
    )
    return AmbientState(devices, cache_enabled)


def in_a_new_thread(ask: Callable[[], T]) -> T:
    """Call a function where the caller is in no region, transform, mode, device or recording.

    What torch is asked once, and remembered, must not depend on where the caller happens to be.

    Args:
        ask: called once; it names the dtype of what it makes, whose default is the process's.

    Raises:
        BaseException: what the function raises.
    """
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(ask).result()


def shield() -> AbstractContextManager[None]:
    """Return a context in which autocast is off for the calling thread, whatever was on before.

    Operators are not cast, and TorchScript's pass sees no ambient autocast. Leaving puts back what
    was on. A region entered inside works as ever. Each context is for one ``with`` statement.
    """
    context: AbstractContextManager[None] = torch._C._DisableAutocast()
    return context


@contextmanager
def jit_autocast_pass(enabled: bool) -> Iterator[None]:
    """Set TorchScript's autocast pass on or off inside the block, and put it back after.

    The flag belongs to the process, not to the thread. While several blocks are open, in one thread
    or in many, the one entered last decides; when it is left, the last entered of those still
    open decides; when the last open block is left, in whatever order, the flag is what it was
    before the first. Code that must not depend on what other threads ask for needs :func:`shield`,
    which is the thread's own, or a program lowered by this library, which never asks the flag.

    Args:
        enabled: whether the pass runs on graphs that meet their first run inside the block.

    Raises:
        ArgumentError: ``enabled`` is not a bool.
    """
    if not isinstance(enabled, bool):
        raise ArgumentError(
            "enabled", f"{enabled!r:.60} of type {type(enabled).__name__}", "True or False"
        )
    request = _Request(enabled)
    try:
        _pass_flag.add(request)
        yield
    finally:
        _pass_flag.remove(request)


@dataclass(frozen=True, eq=False, slots=True)
class _Request:
    enabled: bool


class _PassFlag:
    """The open requests, oldest first, and the flag's value from before the oldest."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._open: list[_Request] = []
        self._before = True

    def add(self, request: _Request) -> None:
        with self._lock:
            self._open.append(request)
            before = torch._C._jit_set_autocast_mode(request.enabled)
            if len(self._open) == 1:
                self._before = before

    def remove(self, request: _Request) -> None:
        with self._lock:
            if request in self._open:
                self._open.remove(request)
                last = self._open[-1].enabled if self._open else self._before
                torch._C._jit_set_autocast_mode(last)


_pass_flag = _PassFlag()
