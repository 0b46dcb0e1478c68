"""Dtypes as people and files write them, and as callers give them."""

from __future__ import annotations

import torch

from amp_script.errors import ArgumentError

__all__ = ["dtype_name", "require_dtype"]


def dtype_name(dtype: torch.dtype | None, unknown: str = "unknown") -> str:
    """The name of a dtype without its module, such as ``"bfloat16"``.

    Args:
        dtype: the dtype.
        unknown: what stands for None.
    """
    return unknown if dtype is None else str(dtype).removeprefix("torch.")


def require_dtype(name: str, value: object) -> None:
    """Refuse what is neither a dtype nor None.

    Args:
        name: the argument's name.
        value: what was given.

    Raises:
        ArgumentError: it is something else, such as the name of a dtype.
    """
    if value is not None and not isinstance(value, torch.dtype):
        named = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
        advice = f"Give torch.{value}" if named else ""
        raise ArgumentError(
            name, f"the {type(value).__name__} {value!r:.60}", "a torch.dtype", advice
        )
