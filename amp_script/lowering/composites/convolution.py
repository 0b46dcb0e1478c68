"""Convolutions whose padding is given in words, and one that not every device casts itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes, decomposes_text


def _of_dim(values: list[int], dim: int) -> int:
    return values[0] if len(values) == 1 else values[dim]


@decomposes("aten::_convolution_mode")
def _convolution_mode(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: str,
    dilation: list[int],
    groups: int,
) -> Tensor:
    if padding == "valid":
        return torch.convolution(input, weight, bias, stride, [0], dilation, False, [0], groups)
    assert padding == "same", "Invalid padding string"
    dims = weight.dim() - 2
    assert dims > 0, "weight should have at least three dimensions"
    assert input.dim() == weight.dim(), "Expected input with the dimensions of weight"
    both: list[int] = []
    uneven: list[int] = [0] * (2 * dims)
    is_even = True
    for dim in range(dims):
        assert _of_dim(stride, dim) == 1, "padding='same' is not supported for strided convolutions"
        total = _of_dim(dilation, dim) * (weight.size(dim + 2) - 1)
        both.append(total // 2)
        if total % 2 == 1:
            is_even = False
            uneven[2 * (dims - 1 - dim) + 1] = 1
    if not is_even:
        input = torch.constant_pad_nd(input, uneven, 0)
    return torch.convolution(input, weight, bias, stride, both, dilation, False, [0] * dims, groups)


def _padded_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: str,
    dilation: list[int],
    groups: int,
    dims: int,
) -> Tensor:
    is_batched = input.dim() == dims + 2
    assert is_batched or input.dim() == dims + 1, "Expected an input with or without a batch"
    batch = input if is_batched else input.unsqueeze(0)
    output = torch.ops.aten._convolution_mode(
        batch, weight, bias, stride, padding, dilation, groups
    )
    return output if is_batched else output.squeeze(0)


_CONVOLUTION = """
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    stride: List[int],
    padding: str,
    dilation: List[int],
    groups: int,
) -> Tensor:
    if input.is_complex():
        return torch.conv{dims}d(input, weight, bias, stride, padding, dilation, groups)
    return padded_convolution(input, weight, bias, stride, padding, dilation, groups, {dims})
"""
_NAMES = {"torch": torch, "padded_convolution": _padded_convolution}

for _dims in (1, 2, 3):
    decomposes_text(f"aten::conv{_dims}d.padding", _CONVOLUTION.format(dims=_dims), _NAMES)


@decomposes("aten::conv_transpose3d.input")
def _conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    output_padding: list[int],
    groups: int,
    dilation: list[int],
) -> Tensor:
    # On MPS torch 2.6 casts inside it alone.
    if input.is_complex():
        return torch.conv_transpose3d(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    is_batched = input.dim() == 5
    assert is_batched or input.dim() == 4, "Expected an input with or without a batch"
    output = torch.convolution(
        input if is_batched else input.unsqueeze(0),
        weight,
        bias,
        stride,
        padding,
        dilation,
        True,
        output_padding,
        groups,
    )
    return output if is_batched else output.squeeze(0)
