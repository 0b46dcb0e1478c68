"""Operators that compute plans know: those with kernels of their own, and what others return.

Each table holds qualified names without overloads; an overload with a dtype argument that is given
is never taken for one of these (:func:`amp_script.compute.dtypes.infer`). What writes to a tensor
leaves it its dtype, and is in none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from .processor import Kind

__all__ = ["AGREEING", "ALIKE", "KEEP_DTYPE", "KINDS", "MADE", "PROMOTE", "aten"]


def aten(names: str) -> frozenset[str]:
    """Qualified names of operators."""
    return frozenset(f"aten::{name}" for name in names.split())


KINDS: Final[Mapping[str, Kind]] = {
    **dict.fromkeys(
        aten(
            "linear mm addmm _addmm_activation bmm baddbmm addbmm matmul mv addmv dot vdot "
            "inner tensordot einsum bilinear linalg_vecdot linalg_multi_dot chain_matmul addr outer"
        ),
        Kind.MATMUL,
    ),
    **dict.fromkeys(
        aten(
            "_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
            "conv_transpose2d conv_transpose3d mkldnn_convolution"
        ),
        Kind.CONVOLUTION,
    ),
    **dict.fromkeys(
        aten(
            "scaled_dot_product_attention _native_multi_head_attention "
            "_transformer_encoder_layer_fwd"
        ),
        Kind.ATTENTION,
    ),
    **dict.fromkeys(
        aten(
            "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
            "mkldnn_rnn_layer"
        ),
        Kind.RECURRENT,
    ),
}
"""Operators that a plan may run in float32 kernels."""

AGREEING: Final[Mapping[str, Sequence[int]]] = {
    "aten::mkldnn_convolution": (0,),
    "aten::_transformer_encoder_layer_fwd": (0, 1),
    "aten::_native_multi_head_attention": (0, 3),
    **dict.fromkeys(
        aten(
            "linear mm bmm matmul mv dot vdot tensordot _convolution convolution conv1d conv2d "
            "conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
        ),
        range(2),
    ),
    **dict.fromkeys(
        aten("addmm _addmm_activation baddbmm addbmm addmv scaled_dot_product_attention"), range(3)
    ),
    "aten::mkldnn_rnn_layer": range(5),
}
"""Which of an operator's tensors torch refuses unless they have one dtype, which is the result's:
one of them tells it. Other operators in :data:`KINDS` take tensors of several dtypes."""

MADE: Final = aten("empty full ones zeros")
"""Operators that make a tensor of the dtype that they are given."""

KEEP_DTYPE: Final = aten(
    # views and copies
    "alias broadcast_to chunk clone contiguous detach diagonal expand expand_as flatten flip "
    "index index_select gather lift_fresh movedim narrow pad permute pixel_shuffle "
    "pixel_unshuffle positive ravel repeat repeat_interleave reshape reshape_as roll select slice "
    "split split_with_sizes squeeze t tensor_split transpose tril triu unbind "
    "unflatten unfold unsqueeze view view_as constant_pad_nd reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d masked_fill masked_select take_along_dim numpy_T mT "
    # what writes, as a function
    "copy fill index_add index_copy index_fill index_put masked_scatter scatter scatter_add zero "
    # activations
    "celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_softmax mish "
    "prelu relu relu6 selu sigmoid silu softmax softplus tanh threshold "
    # element-wise
    "abs ceil cos cumsum erf exp expm1 floor lerp log log1p neg reciprocal round rsqrt sign sin "
    "sqrt square "
    # normalisation, pooling, reduction, interpolation
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d amax amin "
    "avg_pool1d avg_pool2d avg_pool3d batch_norm dropout feature_dropout group_norm "
    "instance_norm layer_norm max_pool1d max_pool2d max_pool3d mean sum "
    "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d "
    "upsample_nearest2d upsample_nearest3d grid_sampler embedding"
)
"""Operators whose tensor result has the dtype of their first tensor argument, if that floats."""

PROMOTE: Final = aten(
    "add sub rsub mul div maximum minimum where cat stack addcmul addcdiv atan2 fmod "
    "remainder clamp clamp_max clamp_min pow"
)
"""Operators whose tensor result has the promoted dtype of their tensor arguments."""

ALIKE: Final = aten("rms_norm")
"""Operators whose result has the dtype of their tensor arguments if these have one. What it has
otherwise is not the same in every torch: in older ones a float32 weight makes it float32."""
