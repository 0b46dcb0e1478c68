"""TorchScript's compiler, without the warning that it is deprecated.

Torch 2.14 shows that warning to everybody, and users of this library have called no
``torch.jit.script``. It also comes for each function that compiled code calls.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._script._script_impl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.jit._script import _script_impl  # type: ignore[attr-defined]  # torch's stub lacks it

from .interception import replaced

__all__ = ["compile_function", "compiling_quietly"]


def compile_function(function: Callable[..., object]) -> torch._C.ScriptFunction[..., object]:
    """Do what ``torch.jit.script(function)`` does."""
    with compiling_quietly():
        compiled: torch._C.ScriptFunction[..., object] = _script_impl(function)
    return compiled


@contextmanager
def compiling_quietly() -> Iterator[None]:
    """Compile what compiled code calls without a warning, in the calling thread."""
    with replaced(torch.jit, "script", _script):
        yield


def _script(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    # The compiler says where the names of a function are looked up; users do not.
    quietly = "_rcb" in kwargs
    return _script_impl(*args, **kwargs) if quietly else original(*args, **kwargs)
