"""Standing in for a function or method while a block runs, for one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(owner: object, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Put a function in the place of another, for calls from the calling thread.

    Other threads, and everyone afterwards, call the original.

    Args:
        owner: the class or module that it is looked up on.
        name: its name there; a class may have it inherited.
        replacement: called with the original before the arguments.
    """
    own = vars(owner).get(name)
    original = getattr(owner, name)
    thread = threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            return replacement(original, *args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, chosen)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
