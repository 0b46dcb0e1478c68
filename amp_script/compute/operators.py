"""Operators that compute plans know: those with kernels of their own, and what others return.

Each table holds qualified names without overloads; an overload with a dtype argument that is given
is never taken for one of these (:func:`amp_script.compute.dtypes.infer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from .processor import Kind

__all__ = ["KEEP_DTYPE", "KINDS", "PROMOTE"]


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


KINDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(
        _aten(
            "linear mm addmm addmm_ _addmm_activation bmm baddbmm addbmm matmul mv addmv dot vdot "
            "inner tensordot einsum bilinear linalg_vecdot linalg_multi_dot chain_matmul addr outer"
        ),
        Kind.MATMUL,
    ),
    **dict.fromkeys(
        _aten(
            "_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
            "conv_transpose2d conv_transpose3d mkldnn_convolution"
        ),
        Kind.CONVOLUTION,
    ),
    **dict.fromkeys(
        _aten(
            "scaled_dot_product_attention _native_multi_head_attention "
            "_transformer_encoder_layer_fwd"
        ),
        Kind.ATTENTION,
    ),
    **dict.fromkeys(
        _aten(
            "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
            "mkldnn_rnn_layer"
        ),
        Kind.RECURRENT,
    ),
}
"""Operators that a plan may run in float32 kernels."""

KEEP_DTYPE: Final = _aten(
    # views and copies
    "alias broadcast_to chunk clone contiguous detach diagonal expand expand_as flatten flip "
    "index index_select gather lift_fresh movedim moveaxis narrow pad permute pixel_shuffle "
    "pixel_unshuffle positive ravel repeat repeat_interleave reshape reshape_as roll select slice "
    "split split_with_sizes squeeze swapaxes swapdims t tensor_split transpose tril triu unbind "
    "unflatten unfold unsqueeze view view_as constant_pad_nd reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d masked_fill masked_select take_along_dim T mT "
    # activations
    "celu celu_ elu elu_ gelu glu hardsigmoid hardsigmoid_ hardswish hardswish_ hardtanh hardtanh_ "
    "leaky_relu leaky_relu_ log_sigmoid log_softmax mish mish_ prelu relu relu_ relu6 relu6_ selu "
    "selu_ sigmoid sigmoid_ silu silu_ softmax softplus softsign tanh tanh_ tanhshrink threshold "
    # element-wise
    "abs ceil clamp clamp_ clamp_max clamp_min cos cumsum erf exp expm1 floor log log1p neg pow "
    "reciprocal round rsqrt sign sin sqrt square "
    # normalisation, pooling, reduction, interpolation
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d amax amin "
    "avg_pool1d avg_pool2d avg_pool3d batch_norm dropout dropout_ feature_dropout group_norm "
    "instance_norm layer_norm max_pool1d max_pool2d max_pool3d mean sum rms_norm "
    "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d grid_sampler embedding"
)
"""Operators whose tensor result has the dtype of their first tensor argument, if that floats."""

PROMOTE: Final = _aten(
    "add add_ sub sub_ rsub mul mul_ div div_ maximum minimum where cat concat stack lerp addcmul "
    "addcdiv atan2 fmod remainder"
)
"""Operators whose tensor result has the promoted dtype of their tensor arguments."""
