"""Normalization: ``instance_norm``."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes


def _repeated(tensor: Tensor | None, times: int) -> Tensor | None:
    return None if tensor is None else tensor.repeat([times])


@decomposes("aten::instance_norm")
def _instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if not use_input_stats:
        assert running_mean is not None, "Expected running_mean if use_input_stats is false"
        assert running_var is not None, "Expected running_var if use_input_stats is false"
    batch, channels = input.size(0), input.size(1)
    mean, var = _repeated(running_mean, batch), _repeated(running_var, batch)
    output = torch.batch_norm(
        input.contiguous().view([1, batch * channels] + list(input.shape[2:])),
        _repeated(weight, batch),
        _repeated(bias, batch),
        mean,
        var,
        use_input_stats,
        momentum,
        eps,
        cudnn_enabled,
    )
    if running_mean is not None and mean is not None:
        torch.ops.aten.alias(running_mean).copy_(mean.view([batch, channels]).mean([0], False))
    if running_var is not None and var is not None:
        torch.ops.aten.alias(running_var).copy_(var.view([batch, channels]).mean([0], False))
    return output.view(input.shape)
