"""What an exception of others says, in one line."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["first_line", "gist"]

_THROWN: Final = re.compile(r"^[\w.]+: .*", re.MULTILINE)
"""What was thrown, below the stack that TorchScript tells first, whose lines begin otherwise."""


def gist(error: BaseException) -> str:
    """The type of an exception and its first line; of one from a TorchScript program, what was
    thrown there.
    """
    text = str(error)
    if "TorchScript interpreter" in text and (thrown := _THROWN.search(text)):
        return thrown[0]
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of what an exception says that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
