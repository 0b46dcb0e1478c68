"""Standing in for a function or method while a block runs, for one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TypeAlias

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

        @wraps(original)  # for those who look at its signature
        def chosen(*args: object, **kwargs: object) -> object:
            replacements = by_thread.get(threading.get_ident())
            if replacements:
                return replacements[-1](original, *args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, chosen)

    def put_back(self) -> None:
        if self._own is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._own)


_lock = threading.RLock()
_places: dict[tuple[int, str], _Place] = {}
