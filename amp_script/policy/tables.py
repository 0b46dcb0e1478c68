"""What eager autocast does to PyTorch's own operators: one table a device family.

A table maps an operator of the ``aten`` namespace, named with its overload (``"conv1d.padding"``;
no dot for the default overload), to a :class:`~amp_script.policy.kinds.Rule`. Tables are composed
from groups of operators that families share, so that a fact stands once.

Each table is for all of torch 2.6 to 2.15: an operator that one version handles and another does
not is in the table, and :func:`amp_script.policy.lookup` asks the installed dispatcher whether it
is handled there. The overloads that take dimension names, for one, left in the middle of the range.

Source: the registrations in ``ATen/autocast_mode.h`` and ``autocast_mode.cpp``; the observer
(:mod:`amp_script.policy.observe`) proves them for the installed torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from .kinds import Policy, Rule

Table = Mapping[str, Rule]

ELIGIBLE_DEVICE_TYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("cpu",), "cuda": ("cuda", "xla")}
)
"""Where a tensor may lie to be eligible, by device type of the region; a device type that is not
here takes its own tensors alone. On the CPU, tensors in oneDNN's own layout are among them."""


def eligible_device_types(device_type: str) -> tuple[str, ...]:
    """The device types whose tensors a region on ``device_type`` casts."""
    return ELIGIBLE_DEVICE_TYPES.get(device_type, (device_type,))


def _operators(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _rules(policy: Policy, *groups: Iterable[str]) -> dict[str, Rule]:
    return {operator: Rule(policy) for group in groups for operator in group}


# Lower precision ----------------------------------------------------------------------------------

_MATRIX_PRODUCTS = _operators("addbmm addmm baddbmm bmm linear matmul mm prelu")

_CONVOLUTIONS = _operators(
    """_convolution.deprecated conv1d conv2d conv3d conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input"""
)

_ATTENTION = _operators("scaled_dot_product_attention")

_VECTOR_DOT = _operators("linalg_vecdot")

_ACCELERATOR_PRODUCTS = _operators("addmv addr chain_matmul einsum linalg_multi_dot mv lstm_cell")

_ACCELERATOR_CONVOLUTIONS = _operators("_convolution convolution")

_RECURRENT_CELLS = _operators(
    "_thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell rnn_relu_cell rnn_tanh_cell"
)

_FLASH_ATTENTION = _operators("_scaled_dot_product_flash_attention")

_CUDNN_CONVOLUTIONS = _operators("cudnn_convolution cudnn_convolution_transpose")

_CPU_LOWER = _operators(
    """_addmm_activation _native_multi_head_attention conv1d.padding conv2d.padding conv3d.padding
    mkldnn_rnn_layer"""
)

# float32 ------------------------------------------------------------------------------------------

_LOSSES = _operators(
    """binary_cross_entropy_with_logits cdist cosine_embedding_loss hinge_embedding_loss huber_loss
    kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
    nll_loss2d poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss"""
)

_ACCELERATOR_FLOAT32 = _operators(
    """acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm
    layer_norm log log10 log1p log2 logsumexp native_layer_norm nuclear_norm nuclear_norm.dim pdist
    pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rsqrt sinh softplus tan"""
)

_RMS_NORM = _operators("rms_norm")

_UPSAMPLING = _operators(
    """_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d"""
)

_CPU_FLOAT32 = _operators(
    """_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d
    avg_pool3d binary_cross_entropy cholesky cholesky_inverse cholesky_solve cross_entropy_loss
    ctc_loss.IntList ctc_loss.Tensor fake_quantize_per_tensor_affine fractional_max_pool2d
    fractional_max_pool3d geqrf grid_sampler grid_sampler_2d grid_sampler_3d inverse lu_solve
    max_pool3d max_unpool2d max_unpool3d multilabel_margin_loss_forward nanquantile
    nanquantile.scalar orgqr ormqr pinverse polar prod prod.dim_Dimname prod.dim_int qr quantile
    quantile.scalar reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    replication_pad3d stft stft.center svd trace triangular_solve view_as_complex"""
)

_FOURIER = _operators(
    """fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft
    fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn"""
)

_MATRIX_SQUARE_ROOT = _operators("linalg_matrix_sqrth")

_LINEAR_ALGEBRA = _operators(
    """linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh
    linalg_eigvals linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq
    linalg_matrix_rank linalg_matrix_rank.atol_rtol_float linalg_matrix_rank.atol_rtol_tensor
    linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve"""
)

# float32 through a dtype --------------------------------------------------------------------------

_TAKING_A_DTYPE = _operators(
    """cumprod cumprod.dimname cumsum cumsum.dimname linalg_matrix_norm linalg_matrix_norm.str_ord
    linalg_vector_norm log_softmax.Dimname log_softmax.int prod prod.dim_Dimname prod.dim_int
    softmax.Dimname softmax.int sum sum.dim_DimnameList sum.dim_IntList"""
)

_OVERLOADS_WITH_A_DTYPE = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}

_APPENDED_DTYPE = {
    operator: Rule(Policy.FLOAT32_APPENDED_DTYPE, overload=overload)
    for operator, overload in _OVERLOADS_WITH_A_DTYPE.items()
}

# Promote ------------------------------------------------------------------------------------------

_ACCELERATOR_PROMOTE = _operators(
    "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot"
)

_COMPLEX_DOT = _operators("vdot")

_CPU_PROMOTE = _operators("cat index_copy index_copy.dimname stack")

# Refused ------------------------------------------------------------------------------------------

_REFUSED = {
    "binary_cross_entropy": Rule(
        Policy.REFUSED,
        message="binary_cross_entropy is unsafe to autocast on this device: "
        "eager autocast raises RuntimeError for it, whatever the dtypes. Leave the sigmoid before "
        "it out and call binary_cross_entropy_with_logits, or call it where autocast is disabled",
    )
}

# Cast to a dtype of its own -----------------------------------------------------------------------

# Builds for an accelerator register these by hand, and with float16 whatever the region's dtype.
_VENDOR_RECURRENCE = {
    operator: Rule(Policy.CAST_INPUTS, dtype=torch.float16)
    for operator in ("_cudnn_rnn", "miopen_rnn")
}

# The tables ---------------------------------------------------------------------------------------

CPU: Table = MappingProxyType(
    _rules(Policy.LOWER, _MATRIX_PRODUCTS, _CONVOLUTIONS, _ATTENTION, _VECTOR_DOT, _CPU_LOWER)
    | _rules(Policy.FLOAT32, _LOSSES, _CPU_FLOAT32, _FOURIER, _LINEAR_ALGEBRA, _MATRIX_SQUARE_ROOT)
    | _rules(Policy.PROMOTE, _CPU_PROMOTE)
)

_COMMON_ACCELERATOR = (
    _rules(
        Policy.LOWER,
        _MATRIX_PRODUCTS,
        _CONVOLUTIONS,
        _ATTENTION,
        _ACCELERATOR_PRODUCTS,
        _ACCELERATOR_CONVOLUTIONS,
    )
    | _rules(Policy.FLOAT32, _LOSSES, _ACCELERATOR_FLOAT32)
    | _rules(Policy.PROMOTE, _ACCELERATOR_PROMOTE)
)

_ACCELERATOR = (
    _COMMON_ACCELERATOR
    | _rules(Policy.LOWER, _VECTOR_DOT, _RECURRENT_CELLS, _FLASH_ATTENTION)
    | _rules(Policy.FLOAT32, _RMS_NORM, _UPSAMPLING)
    | _rules(Policy.FLOAT32_OPTIONAL_DTYPE, _TAKING_A_DTYPE)
    | _APPENDED_DTYPE
    | _rules(Policy.PROMOTE, _COMPLEX_DOT)
    | _REFUSED
)

XPU: Table = MappingProxyType(_ACCELERATOR)
MTIA: Table = XPU
MAIA: Table = XPU

PRIVATE: Table = XPU
"""A private backend registers its own autocast kernels; torch's header offers it the lists that
make up this table. One that registers something else is told apart by the observer."""

CUDA: Table = MappingProxyType(
    _ACCELERATOR
    | _rules(Policy.LOWER, _CUDNN_CONVOLUTIONS)
    | _rules(Policy.FLOAT32, _MATRIX_SQUARE_ROOT)
    | _VENDOR_RECURRENCE
)

MPS: Table = MappingProxyType(
    _COMMON_ACCELERATOR
    | _rules(Policy.LOWER, _operators("_mps_convolution"))
    # On this device softmax, sum and their kin cast their input, whatever dtype the caller names.
    | _rules(Policy.FLOAT32, _operators("batch_norm conv_transpose3d.input"), _TAKING_A_DTYPE)
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {"cpu": CPU, "cuda": CUDA, "xpu": XPU, "mps": MPS, "mtia": MTIA, "maia": MAIA}
)
"""The table of each device type; the private backend, whose name varies, has :data:`PRIVATE`."""
