"""The fast path of ``nn.TransformerEncoderLayer``, one operator for the whole layer.

Its kernel calls operators that autocast knows: attention, and the two products of the feed-forward
part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes


def _product(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = x.view(x.size(0) * x.size(1), x.size(2))
    return torch.addmm(bias, rows, weight.t()).view(x.size(0), x.size(1), -1)


def _activated_product(x: Tensor, weight: Tensor, bias: Tensor, use_gelu: bool) -> Tensor:
    rows = x.view(x.size(0) * x.size(1), x.size(2))
    product = torch.ops.aten._addmm_activation(bias, rows, weight.t(), use_gelu=use_gelu)
    return product.view(x.size(0), x.size(1), -1)


@decomposes("aten::_transformer_encoder_layer_fwd")
def _transformer_encoder_layer_fwd(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    if src.numel() == 0:
        return src.clone()
    size = [embed_dim]
    x = src
    if norm_first:
        x = torch.layer_norm(x, size, norm_weight_1, norm_bias_1, eps)
    x, _ = torch.ops.aten._native_multi_head_attention(
        x,
        x,
        x,
        embed_dim,
        num_heads,
        qkv_weight,
        qkv_bias,
        proj_weight,
        proj_bias,
        mask,
        False,
        True,
        mask_type,
    )
    x.add_(src)
    if not norm_first:
        x = torch.layer_norm(x, size, norm_weight_1, norm_bias_1, eps)
    attended = x
    if norm_first:
        x = torch.layer_norm(x, size, norm_weight_2, norm_bias_2, eps)
    x = _activated_product(x, ffn_weight_1, ffn_bias_1, use_gelu)
    x = _product(x, ffn_weight_2, ffn_bias_2)
    x.add_(attended)
    if not norm_first:
        x = torch.layer_norm(x, size, norm_weight_2, norm_bias_2, eps)
    return x
