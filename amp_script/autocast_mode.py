"""autocast: regions in which operators run in lower precision, in eager code and in TorchScript.

The class is torch's in all that its users see, and a subclass of it. It differs in three things:
what to put back is kept per entry and not on the instance, so that one instance may be entered
again, nested, and from many threads; a decorated coroutine or generator runs in the region, not
only its creation; and TorchScript compiles a decorated function with its region.

There is a branch for each of those who meet the class:

- Eager code makes an instance in :class:`_Making`, and enters and leaves it in the methods.
- TorchScript compiles the functions named ``_scripted_...`` in place of the methods, under the name
  of torch's class, by which its autocast pass knows a region.
- ``torch.compile`` and strict export know torch's class by identity, and are given an instance of
  it by ``__new__``. Non-strict export runs the eager branch, which tells it of the region.

Private names used here, tried on torch 2.6, 2.13 and 2.14: ``_drop`` and ``FunctionModifiers`` of
``torch._jit_internal``, and the attributes ``_jit_override_qualname`` and
``_torchscript_modifier`` of classes; ``torch._C._is_torch_function_mode_enabled``;
``_dispatch_key_for_device``, ``_dispatch_key_parse``, ``_dispatch_tls_is_dispatch_key_excluded``
and ``_dispatch_tls_set_dispatch_key_excluded`` of ``torch._C``, which are all that
``torch.is_autocast_enabled`` and ``torch.set_autocast_enabled`` do, without the time that these
take to read a device's name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from torch import (
    autocast_decrement_nesting,
    autocast_increment_nesting,
    clear_autocast_cache,
    get_autocast_dtype,
    is_autocast_cache_enabled,
    set_autocast_cache_enabled,
    set_autocast_dtype,
)
from torch._C import DispatchKey
from torch._C import _dispatch_tls_is_dispatch_key_excluded as is_excluded
from torch._C import _dispatch_tls_set_dispatch_key_excluded as set_excluded
from torch._C import _is_torch_function_mode_enabled as is_function_mode_enabled
from torch._jit_internal import FunctionModifiers, _drop
from torch.compiler import is_dynamo_compiling
from typing_extensions import Self

from amp_script.compiled import region_in_compiled_code
from amp_script.decoration import decorate
from amp_script.devices import SETTLED, admit, is_autocast_available, permits
from amp_script.predispatch import record_enter, record_exit

__all__ = ["autocast", "autocast_decorator", "is_autocast_available"]

F = TypeVar("F", bound=Callable[..., object])


class _Entry(NamedTuple):
    """A region that a thread is in, and what leaving it puts back.

    Attributes:
        region: the instance entered.
        excluded: whether autocast was off on its device, its dispatch key excluded.
        dtype: autocast's dtype on its device.
        cache_enabled: the cache flag.
        recorded: whether an export may have recorded the entry.
    """

    region: autocast
    excluded: bool
    dtype: torch.dtype
    cache_enabled: bool
    recorded: bool


_PlainEntry = tuple["autocast", bool, torch.dtype, bool, bool]
"""An :class:`_Entry` as the stack holds it: a named tuple takes many times as long to make."""

_stack = threading.local()
"""``entries``: a list of the regions that the thread is in, the innermost last."""


@cache
def _autocast_key(device_type: str) -> DispatchKey:
    name = torch._C._dispatch_key_for_device(torch.device(device_type).type)
    return torch._C._dispatch_key_parse(f"Autocast{name}")


# TorchScript resolves the annotations of a class's methods as names, without dots.
_dtype = torch.dtype

_new = object.__new__
_SETTLED = {name: (_autocast_key(name), dtypes) for name, dtypes in SETTLED.items()}


class _Making(type):
    """Makes a region as ``__init__`` does, but in one step, and asks nothing that is settled.

    ``type.__call__`` takes two steps, ``__new__`` and ``__init__``, and that alone would cost a
    twentieth of the time that a region takes to make, enter and leave.
    """

    if not TYPE_CHECKING:  # A checker would take what this returns for the type of every region.

        def __call__(
            cls,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> autocast:
            region = _new(cls)
            try:
                region._key, settled = _SETTLED[device_type]
            except (KeyError, TypeError):
                admit(device_type)
                region._key, settled = _autocast_key(device_type), ()
            if dtype is None:
                dtype = get_autocast_dtype(device_type)
            if enabled is not True or dtype not in settled:
                enabled = permits(device_type, dtype, enabled, stacklevel=2)
            region.device = device_type
            region.fast_dtype = dtype
            region._enabled = enabled
            region._cache_enabled = (
                is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
            )
            return region


class _MakingSubclass(_Making):
    """Makes a region of a subclass, whose ``__init__`` may take other arguments."""

    if not TYPE_CHECKING:
        __call__ = type.__call__


def _not_entered(region: autocast) -> RuntimeError:
    return RuntimeError(
        f"left autocast({region.device!r}, {region.fast_dtype}), which this thread has not "
        "entered: a region is left in the thread that entered it, as often as it was entered"
    )


def _take_from_under(region: autocast, entries: list[_PlainEntry]) -> _Entry:
    """Take out an entry that others lie on, and return what leaving it has to put back.

    What it found is handed to the entries above it, to put back when they are left. So whatever the
    order in which regions are left, each stays in force until it is, and after the last
    the state is what it was before the first.
    """
    index = max((i for i, entry in enumerate(entries) if entry[0] is region), default=None)
    if index is None:
        raise _not_entered(region)
    entry = _Entry._make(entries.pop(index))
    entries[index] = _Entry._make(entries[index])._replace(cache_enabled=entry.cache_enabled)
    entry = entry._replace(cache_enabled=is_autocast_cache_enabled())
    for heir in range(index, len(entries)):
        if entries[heir][0]._key == region._key:
            entries[heir] = _Entry._make(entries[heir])._replace(
                excluded=entry.excluded, dtype=entry.dtype
            )
            return entry._replace(
                excluded=is_excluded(region._key), dtype=get_autocast_dtype(region.device)
            )
    return entry


def _scripted_init(
    self: autocast,
    device_type: str,
    dtype: _dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> None:
    self.device = device_type
    self.fast_dtype = torch.get_autocast_dtype(device_type) if dtype is None else dtype
    self._enabled = enabled


def _scripted_enter(self: autocast) -> autocast:
    return self


def _scripted_exit(self: autocast, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
    return


def _compiled_from(source: Callable[..., object]) -> Callable[[F], F]:
    """Have TorchScript compile a method from the source of another function.

    It looks for the source of what it compiles where ``__wrapped__`` leads.
    """

    def mark(method: F) -> F:
        method.__wrapped__ = source  # type: ignore[attr-defined]  # functions take attributes
        return method

    return mark


def _uncompiled(func: F) -> F:
    """Keep TorchScript from a method; the decorator of older torch has no types."""
    _drop(func)
    return func


class autocast(torch.amp.autocast_mode.autocast, metaclass=_Making):  # noqa: N801  # torch's name
    """A region in which operators on one device type run in lower precision.

    Use it as a context manager, ``with autocast("cpu"):``, or as a decorator of a function, method,
    coroutine function or generator. One instance may be entered again, nested and from many
    threads; each entry puts back what it found. The state belongs to the thread.

    Args:
        device_type: ``"cpu"``, ``"cuda"``, ``"xpu"`` and so on, as in ``tensor.device.type``.
        dtype: the dtype to run in; None for the device's default, as of now.
        enabled: False for a region in which nothing is cast.
        cache_enabled: whether casts of leaf tensors are kept for the region; None for as it is now.

    Raises:
        ValueError: ``device_type`` is no ``str``.
        RuntimeError: there is no autocast on the device type, or its device cannot do bfloat16.
        AssertionError: a private backend has not registered what autocast asks of it.

    Warns:
        UserWarning: the device does not support ``dtype``, or CUDA is absent; the region is made,
            and disabled.
    """

    _jit_override_qualname = "__torch__.torch.amp.autocast_mode.autocast"
    _torchscript_modifier: str

    device: str
    fast_dtype: torch.dtype
    _enabled: bool
    _cache_enabled: bool
    _key: DispatchKey

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Give Dynamo a region of torch's own; eager code does not come here."""
        if is_dynamo_compiling():
            # As torch's; the arguments are those of __init__, or of a subclass, which is refused.
            return region_in_compiled_code(cls is not autocast, *args, **kwargs)  # type: ignore[return-value, arg-type]
        return object.__new__(cls)

    @_drop
    def __init_subclass__(cls, **kwargs: object) -> None:
        """Leave a subclass its own arguments, and have TorchScript refuse it: it would not cast."""
        super().__init_subclass__(**kwargs)
        cls._jit_override_qualname = f"__torch__.{cls.__module__}.{cls.__name__}"
        cls._torchscript_modifier = FunctionModifiers.IGNORE
        if type(cls) is _Making:
            cls.__class__ = _MakingSubclass  # type: ignore[assignment]  # a metaclass, not a class

    @_compiled_from(_scripted_init)
    def __init__(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        """Make a region of a subclass; :class:`_Making` does the same for the class itself."""
        admit(device_type)
        self._key = _autocast_key(device_type)
        self.device = device_type
        self.fast_dtype = get_autocast_dtype(device_type) if dtype is None else dtype
        self._enabled = permits(device_type, self.fast_dtype, enabled, stacklevel=2)
        self._cache_enabled = (
            is_autocast_cache_enabled() if cache_enabled is None else cache_enabled
        )

    @_compiled_from(_scripted_enter)
    def __enter__(self) -> Self:
        """Enter the region in the calling thread, and return the instance."""
        device, key = self.device, self._key
        dtype = get_autocast_dtype(device)
        cache_enabled = is_autocast_cache_enabled()
        recorded = is_function_mode_enabled()
        try:
            entries = _stack.entries
        except AttributeError:
            entries = _stack.entries = []
        autocast_increment_nesting()
        excluded = is_excluded(key)
        entries.append((self, excluded, dtype, cache_enabled, recorded))
        try:
            if self.fast_dtype is not dtype:
                set_autocast_dtype(device, self.fast_dtype)
            set_excluded(key, not self._enabled)
            if self._cache_enabled is not cache_enabled:
                set_autocast_cache_enabled(self._cache_enabled)
        except BaseException:
            entries[-1] = (self, excluded, dtype, cache_enabled, False)
            self.__exit__(None, None, None)
            raise
        if recorded:
            record_enter(device, self.fast_dtype, self._enabled, self._cache_enabled)
        return self

    @_compiled_from(_scripted_exit)
    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> Literal[False]:
        """Leave the region, and put back what its last entry in this thread found."""
        try:
            entries = _stack.entries
            region, excluded, dtype, cache_enabled, recorded = entries.pop()
        except (AttributeError, IndexError):
            raise _not_entered(self) from None
        if region is not self:
            entries.append((region, excluded, dtype, cache_enabled, recorded))
            region, excluded, dtype, cache_enabled, recorded = _take_from_under(self, entries)
        if autocast_decrement_nesting() == 0:
            clear_autocast_cache()
        set_excluded(self._key, excluded)
        set_autocast_dtype(self.device, dtype)
        set_autocast_cache_enabled(cache_enabled)
        if recorded:
            record_exit()
        return False

    @_drop
    def __getstate__(self) -> dict[str, object]:
        """Leave out the dispatch key: in another torch its number is another."""
        return {name: value for name, value in vars(self).items() if name != "_key"}

    @_drop
    def __setstate__(self, state: dict[str, object]) -> None:
        """Take what ``__getstate__`` gave."""
        vars(self).update(state)
        self._key = _autocast_key(self.device)

    @_uncompiled
    def __call__(self, func: F) -> F:
        """Return ``func`` with its body in the region.

        Raises:
            TypeError: ``func`` cannot be called.
        """
        return decorate(self, func)


def autocast_decorator(instance: AbstractContextManager[object, bool | None], func: F) -> F:
    """Return ``func`` with its body in the region ``instance``, as ``instance(func)`` does.

    Args:
        instance: a region, ours or torch's.
        func: what to decorate; see :meth:`autocast.__call__`.

    Raises:
        TypeError: ``func`` cannot be called.
    """
    return decorate(instance, func)
