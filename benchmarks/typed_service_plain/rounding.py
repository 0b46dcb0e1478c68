"""Rounding, and a custom autograd function that lets gradients through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.amp import custom_bwd, custom_fwd
from torch.autograd.function import FunctionCtx


def sixteenths(x: Tensor) -> Tensor:
    """Round ``x``, of any shape, to steps of a sixteenth in float32."""
    return (x.float() * 16).round() / 16


class RoundThrough(torch.autograd.Function):
    """Rounds as :func:`sixteenths` does; the gradient is that of doing nothing."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        """Round ``x``."""
        return sixteenths(x)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        """Give back the gradient of the result."""
        (gradient,) = gradients
        return gradient


round_through: Final[Callable[[Tensor], Tensor]] = RoundThrough.apply
