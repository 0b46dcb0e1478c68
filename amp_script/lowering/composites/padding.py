"""Padding: ``pad`` in all its modes."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes

# Modes are numbers to the inner operator: 0 reflect, 1 replicate, 2 circular, 3 constant.


@decomposes("aten::_pad_enum")
def _pad_enum(self: Tensor, pad: list[int], mode: int, value: float | None) -> Tensor:
    assert len(pad) % 2 == 0, "Padding length must be divisible by 2"
    assert len(pad) <= 2 * self.dim(), "Padding length should be at most twice the dimensions"
    if mode == 3:
        return torch.constant_pad_nd(self, pad, 0.0 if value is None else value)
    assert value is None or value == 0, "Padding mode doesn't take in value argument"
    dims = self.dim() - len(pad) // 2
    assert dims == 1 or dims == 2, "Only 2D, 3D, 4D, 5D padding with non-constant padding"
    assert len(pad) >= 2 and len(pad) <= 6, "Only 2D, 3D, 4D, 5D padding with non-constant padding"
    if mode == 2:
        return torch.ops.aten._pad_circular(self, pad)
    if len(pad) == 2:
        if mode == 0:
            return torch.ops.aten.reflection_pad1d(self, pad)
        return torch.ops.aten.replication_pad1d(self, pad)
    if len(pad) == 4:
        if mode == 0:
            return torch.ops.aten.reflection_pad2d(self, pad)
        return torch.ops.aten.replication_pad2d(self, pad)
    if mode == 0:
        return torch.ops.aten.reflection_pad3d(self, pad)
    return torch.ops.aten.replication_pad3d(self, pad)


@decomposes("aten::pad")
def _pad(self: Tensor, pad: list[int], mode: str, value: float | None) -> Tensor:
    if mode == "constant":
        return _pad_enum(self, pad, 3, value)
    if mode == "reflect":
        return _pad_enum(self, pad, 0, value)
    if mode == "replicate":
        return _pad_enum(self, pad, 1, value)
    assert mode == "circular", "Unrecognised padding mode"
    return _pad_enum(self, pad, 2, value)
