"""Standing in for a function or method while a block runs, for one thread."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from types import FunctionType
from typing import Protocol, TypeAlias

__all__ = ["replaced"]

Replacement: TypeAlias = Callable[..., object]


@contextmanager
def replaced(owner: object, name: str, replacement: Replacement) -> Iterator[None]:
    """Put a function in the place of another, for calls from the calling thread.

    Other threads, and everyone afterwards, call the original. Blocks of several threads may
    overlap in any order; of blocks in one thread, the innermost counts.

    Args:
        owner: the class or module that it is looked up on.
        name: its name there; a class may have it inherited.
        replacement: called with the original before the arguments.
    """
    thread = threading.get_ident()
    with _lock:
        place = _places.get((id(owner), name))
        if place is None:
            place = _places[id(owner), name] = _Place(owner, name)
        replacements = place.by_thread.setdefault(thread, [])
        replacements.append(replacement)
    try:
        yield
    finally:
        with _lock:
            replacements.pop()
            if not replacements:
                del place.by_thread[thread]
            if not place.by_thread:
                place.put_back()
                del _places[id(owner), name]


class _Place:
    """A name whose calls go to what stands in for it in the calling thread."""

    def __init__(self, owner: object, name: str) -> None:
        self._owner, self._name = owner, name
        self._own = vars(owner).get(name)
        self.by_thread: dict[int, list[Replacement]] = {}
        original, by_thread = getattr(owner, name), self.by_thread

        def chosen(*args: object, **kwargs: object) -> object:
            replacements = by_thread.get(threading.get_ident())
            if replacements:
                return replacements[-1](original, *args, **kwargs)
            return original(*args, **kwargs)

        update_wrapper(chosen, original)  # for those who look at its signature
        if isinstance(owner, type) and isinstance(original, FunctionType):
            untouched = inspect.getattr_static(owner, name)
            setattr(owner, name, _Method(untouched, chosen, by_thread))
        else:
            setattr(owner, name, chosen)

    def put_back(self) -> None:
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


class _Method:
    """A method that is another one in some threads: the rest see, and compile, their own."""

    def __init__(
        self, untouched: _Descriptor, chosen: _Descriptor, by_thread: Container[int]
    ) -> None:
        self._untouched, self._chosen, self._by_thread = untouched, chosen, by_thread

    def __get__(self, instance: object, owner: type | None = None) -> object:
        method = self._chosen if threading.get_ident() in self._by_thread else self._untouched
        return method.__get__(instance, owner)


class _Descriptor(Protocol):
    """A function, as it is found on its class."""

    def __get__(self, instance: object, owner: type | None = None, /) -> object: ...


_lock = threading.RLock()
_places: dict[tuple[int, str], _Place] = {}
