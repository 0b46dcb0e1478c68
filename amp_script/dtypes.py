"""The names of dtypes, as people and files write them."""

from __future__ import annotations

import torch

__all__ = ["dtype_name"]


def dtype_name(dtype: torch.dtype | None, unknown: str = "unknown") -> str:
    """The name of a dtype without its module, such as ``"bfloat16"``.

    Args:
        dtype: the dtype.
        unknown: what stands for None.
    """
    return unknown if dtype is None else str(dtype).removeprefix("torch.")
