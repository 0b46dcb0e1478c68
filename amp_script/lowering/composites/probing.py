"""What autocast would do at this place in the program, asked while the program runs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lowered"]


def lowered(tensors: list[Tensor], like: Tensor) -> list[Tensor]:
    """Cast eligible tensors as autocast does before an operator that it lowers.

    For kernels that autocast knows under a name no program can call.

    Args:
        tensors: what to cast.
        like: a tensor on the device whose autocast is meant.
    """
    probe = torch.zeros([1, 1], dtype=like.dtype, device=like.device)
    dtype = torch.mm(probe, probe).dtype
    cast: list[Tensor] = []
    for tensor in tensors:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        cast.append(tensor.to(dtype) if eligible else tensor)
    return cast
