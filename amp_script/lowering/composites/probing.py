"""What autocast would do at this place in the program, asked while the program runs."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["half_where_on"]


def half_where_on(tensors: list[Tensor], like: Tensor) -> list[Tensor]:
    """Cast eligible tensors to float16 where autocast is on, in whatever dtype.

    Eager autocast does so before cuDNN's and MIOpen's recurrent layers, under the names of
    operators that no program can call.

    Args:
        tensors: what to cast.
        like: a tensor on the device whose autocast is meant.
    """
    probe = torch.zeros([1, 1], dtype=torch.float32, device=like.device)
    if torch.mm(probe, probe).dtype == torch.float32:
        return tensors
    cast: list[Tensor] = []
    for tensor in tensors:
        eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
        cast.append(tensor.to(torch.float16) if eligible else tensor)
    return cast
