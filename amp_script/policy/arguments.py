"""The arguments with which the observer calls an operator, with stand-ins for tensors.

An operator's arguments come from :data:`HAND_MADE` where it needs more than square matrices and
plain numbers, and from its schema otherwise. They are valid: every operator runs with them in at
least one dtype. A :class:`Floating` takes whatever dtype the observer tries next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class Floating:
    """A floating-point tensor of a shape, in the dtype that the observer is trying."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Fixed:
    """A tensor of a shape that keeps its dtype whatever the observer tries."""

    shape: tuple[int, ...]
    dtype: torch.dtype


BY_NAME = frozenset(
    {
        "aten::cumprod.dimname",
        "aten::cumsum.dimname",
        "aten::index_copy.dimname",
        "aten::log_softmax.Dimname",
        "aten::norm.names_ScalarOpt_dim",
        "aten::prod.dim_Dimname",
        "aten::softmax.Dimname",
        "aten::sum.dim_DimnameList",
    }
)
"""Overloads that take the name of a dimension, listed by torch up to 2.12. A call from a schema, as
``torch.ops`` and TorchScript make it, cannot pass one."""

Arguments = Sequence[object]
"""Values in the order of the schema, keyword-only ones included; what is left off the end keeps its
default. Lists may hold stand-ins."""


def arguments_for(schema: torch.FunctionSchema) -> Arguments:
    """Arguments for an operator: the hand-made ones, else ones put together from its schema.

    Raises:
        ValueError: a required argument has a type for which there is no stand-in.
    """
    namespace, _, name = schema.name.partition("::")
    if namespace == "aten":
        with_overload = f"{name}.{schema.overload_name}"
        for key in (with_overload, name):
            if key in HAND_MADE:
                return HAND_MADE[key]
    return _from_schema(schema)


def _from_schema(schema: torch.FunctionSchema) -> Arguments:
    required = [a for a in schema.arguments if not a.has_default_value()]
    return [_value_for(schema, argument) for argument in required]


def _value_for(schema: torch.FunctionSchema, argument: torch.Argument) -> object:
    declared = str(argument.real_type)
    if declared not in _VALUES:
        raise ValueError(
            f"no stand-in for argument {argument.name!r} of type {declared} in `{schema}`"
        )
    return _VALUES[declared]


def _f(*shape: int) -> Floating:
    return Floating(shape)


def _i(*shape: int) -> Fixed:
    return Fixed(shape, torch.int64)


_SQUARE = _f(4, 4)
_VECTOR = _f(4)
_BATCH = _f(2, 4, 4)
_SIGNAL = _f(1, 2, 6)
_IMAGE = _f(1, 2, 6, 6)
_VOLUME = _f(1, 2, 6, 6, 6)
_HEADS = _f(1, 2, 4, 8)
_MEAN = 1  # ATen's number for the reduction "mean"

_VALUES: Mapping[str, object] = MappingProxyType(
    {
        "Tensor": _SQUARE,
        "Optional[Tensor]": _SQUARE,
        "List[Tensor]": [_SQUARE, _SQUARE],
        "List[Optional[Tensor]]": [_i(4), None],
        "int": 1,
        "SymInt": 1,
        "float": 0.5,
        "number": 2,
        "bool": False,
        "str": "",
        "List[int]": [1],
        "List[SymInt]": [1],
        "List[float]": [0.5],
        "List[bool]": [False],
        "Optional[int]": None,
        "Optional[SymInt]": None,
        "Optional[float]": None,
        "Optional[number]": None,
        "Optional[bool]": None,
        "Optional[str]": None,
        "Optional[List[int]]": None,
        "Optional[List[SymInt]]": None,
        "Optional[ScalarType]": None,
    }
)

_CONVOLUTION_1D = (_SIGNAL, _f(3, 2, 3), _f(3))
_CONVOLUTION_2D = (_IMAGE, _f(3, 2, 3, 3), _f(3))
_CONVOLUTION_3D = (_VOLUME, _f(3, 2, 3, 3, 3), _f(3))
_FUSED_GATES = (_f(2, 16), _f(2, 16), _f(2, 4), _f(16), _f(16))
_CELL_WEIGHTS = (_f(4, 4), _f(4, 4), _f(4), _f(4))

HAND_MADE: Mapping[str, Arguments] = MappingProxyType(
    {
        # Products
        "addmv": (_VECTOR, _SQUARE, _VECTOR),
        "addr": (_SQUARE, _VECTOR, _VECTOR),
        "addbmm": (_SQUARE, _BATCH, _BATCH),
        "baddbmm": (_BATCH, _BATCH, _BATCH),
        "bmm": (_BATCH, _BATCH),
        "dot": (_VECTOR, _VECTOR),
        "einsum": ("ij,jk->ik", [_SQUARE, _SQUARE]),
        "linear": (_SQUARE, _SQUARE, _VECTOR),
        "bilinear": (_SQUARE, _SQUARE, _f(3, 4, 4), _f(3)),
        "mv": (_SQUARE, _VECTOR),
        "_addmm_activation": (_VECTOR, _SQUARE, _SQUARE),
        "prelu": (_IMAGE, _f(2)),
        "tensordot": (_SQUARE, _SQUARE, [1], [0]),
        "vdot": (_VECTOR, _VECTOR),
        "cross": (_f(2, 3), _f(2, 3)),
        # Convolutions
        "_convolution": (*_CONVOLUTION_1D, [1], [0], [1], False, [0], 1, False, False, True, True),
        "_convolution.deprecated": (
            *(*_CONVOLUTION_1D, [1], [0], [1], False, [0], 1, False, False, True),
        ),
        "_mps_convolution": (*_CONVOLUTION_2D, [0, 0], [1, 1], [1, 1], 1),
        "conv1d": _CONVOLUTION_1D,
        "conv2d": _CONVOLUTION_2D,
        "conv3d": _CONVOLUTION_3D,
        "conv_tbc": (_f(6, 1, 2), _f(3, 2, 3), _f(3)),
        "conv_transpose1d": (_SIGNAL, _f(2, 3, 3), _f(3)),
        "conv_transpose2d.input": (_IMAGE, _f(2, 3, 3, 3), _f(3)),
        "conv_transpose3d.input": (_VOLUME, _f(2, 3, 3, 3, 3), _f(3)),
        "convolution": (*_CONVOLUTION_1D, [1], [0], [1], False, [0], 1),
        "cudnn_convolution": (
            *(_IMAGE, _f(3, 2, 3, 3), [0, 0], [1, 1], [1, 1], 1, False, False, True),
        ),
        "cudnn_convolution_transpose": (
            *(_IMAGE, _f(2, 3, 3, 3), [0, 0], [0, 0], [1, 1], [1, 1], 1, False, False, True),
        ),
        # Attention and recurrence
        "_native_multi_head_attention": (
            *(_BATCH, _BATCH, _BATCH, 4, 2, _f(12, 4), _f(12), _SQUARE, _VECTOR),
        ),
        "_scaled_dot_product_flash_attention": (_HEADS, _HEADS, _HEADS),
        "scaled_dot_product_attention": (_HEADS, _HEADS, _HEADS, _f(4, 4)),
        "_thnn_fused_gru_cell": (_f(2, 12), _f(2, 12), _f(2, 4), _f(12), _f(12)),
        "_thnn_fused_lstm_cell": _FUSED_GATES,
        "gru_cell": (_f(2, 4), _f(2, 4), _f(12, 4), _f(12, 4), _f(12), _f(12)),
        "lstm_cell": (_f(2, 4), [_f(2, 4), _f(2, 4)], _f(16, 4), _f(16, 4), _f(16), _f(16)),
        "rnn_relu_cell": (_f(2, 4), _f(2, 4), *_CELL_WEIGHTS),
        "rnn_tanh_cell": (_f(2, 4), _f(2, 4), *_CELL_WEIGHTS),
        "mkldnn_rnn_layer": (
            *(_f(5, 2, 4), _f(16, 4), _f(16, 4), _f(16), _f(16), _f(2, 4), _f(2, 4)),
            *(False, [], 2, 4, 1, True, False, False, False),
        ),
        # Weights in float64 are not eligible, so that nothing has to be laid out for cuDNN anew.
        "_cudnn_rnn": (
            *(_f(5, 2, 4), [Fixed((4, 4), torch.float64), Fixed((4, 4), torch.float64)], 2),
            *(None, _f(1, 2, 4), None, 0, 4, 0, 1, False, 0.0, False, False, [], None),
        ),
        # Losses
        "binary_cross_entropy": (_SQUARE, _SQUARE, _SQUARE),
        "binary_cross_entropy_with_logits": (_SQUARE, _SQUARE, _SQUARE, _VECTOR),
        "cosine_embedding_loss": (_SQUARE, _SQUARE, _i(4)),
        "cross_entropy_loss": (_SQUARE, _i(4), _VECTOR),
        "ctc_loss.IntList": (_f(6, 2, 5), _i(2, 3), [6, 6], [3, 3]),
        "ctc_loss.Tensor": (_f(6, 2, 5), _i(2, 3), _i(2), _i(2)),
        "margin_ranking_loss": (_VECTOR, _VECTOR, _VECTOR),
        "multi_margin_loss": (_SQUARE, _i(4), 1, 1, _VECTOR),
        "multilabel_margin_loss": (_SQUARE, _i(4, 4)),
        "multilabel_margin_loss_forward": (_SQUARE, _i(4, 4), _MEAN),
        "nll_loss": (_SQUARE, _i(4), _VECTOR),
        "nll_loss2d": (_IMAGE, _i(1, 6, 6), _f(2)),
        "poisson_nll_loss": (_SQUARE, _SQUARE, True, False, 1e-8, _MEAN),
        # Normalisation and norms
        "batch_norm": (_IMAGE, _f(2), _f(2), _f(2), _f(2), True, 0.1, 1e-5, True),
        "group_norm": (_IMAGE, 2, _f(2), _f(2)),
        "layer_norm": (_SQUARE, [4], _VECTOR, _VECTOR),
        "native_layer_norm": (_SQUARE, [4], _VECTOR, _VECTOR, 1e-5),
        "rms_norm": (_SQUARE, [4], _VECTOR),
        "nuclear_norm.dim": (_SQUARE, [0, 1]),
        "renorm": (_SQUARE, 2, 0, 1.0),
        # Pooling, padding, sampling
        "adaptive_avg_pool3d": (_VOLUME, [2, 2, 2]),
        "adaptive_max_pool3d": (_VOLUME, [2, 2, 2]),
        "avg_pool3d": (_VOLUME, [2, 2, 2]),
        "fractional_max_pool2d": (_IMAGE, [2, 2], [3, 3], _f(1, 2, 2)),
        "fractional_max_pool3d": (_VOLUME, [2, 2, 2], [3, 3, 3], _f(1, 2, 3)),
        "max_pool3d": (_VOLUME, [2, 2, 2]),
        "max_unpool2d": (_IMAGE, _i(1, 2, 6, 6), [12, 12]),
        "max_unpool3d": (_VOLUME, _i(1, 2, 6, 6, 6), [12, 12, 12], [2, 2, 2], [0, 0, 0]),
        "reflection_pad1d": (_SIGNAL, [1, 1]),
        "reflection_pad2d": (_IMAGE, [1, 1, 1, 1]),
        "replication_pad1d": (_SIGNAL, [1, 1]),
        "replication_pad2d": (_IMAGE, [1, 1, 1, 1]),
        "replication_pad3d": (_VOLUME, [1, 1, 1, 1, 1, 1]),
        "_grid_sampler_2d_cpu_fallback": (_IMAGE, _f(1, 3, 3, 2), 0, 0, False),
        "grid_sampler": (_IMAGE, _f(1, 3, 3, 2), 0, 0, False),
        "grid_sampler_2d": (_IMAGE, _f(1, 3, 3, 2), 0, 0, False),
        "grid_sampler_3d": (_VOLUME, _f(1, 3, 3, 3, 3), 0, 0, False),
        "_upsample_bicubic2d_aa": (_IMAGE, [8, 8], False),
        "_upsample_bilinear2d_aa": (_IMAGE, [8, 8], False),
        "_upsample_nearest_exact1d": (_SIGNAL, [8]),
        "_upsample_nearest_exact2d": (_IMAGE, [8, 8]),
        "_upsample_nearest_exact3d": (_VOLUME, [8, 8, 8]),
        "upsample_bicubic2d": (_IMAGE, [8, 8], False),
        "upsample_bilinear2d": (_IMAGE, [8, 8], False),
        "upsample_linear1d": (_SIGNAL, [8], False),
        "upsample_nearest1d": (_SIGNAL, [8]),
        "upsample_nearest2d": (_IMAGE, [8, 8]),
        "upsample_nearest3d": (_VOLUME, [8, 8, 8]),
        "upsample_trilinear3d": (_VOLUME, [8, 8, 8], False),
        # Linear algebra
        "cholesky_solve": (_SQUARE, _SQUARE),
        "linalg_cond.p_str": (_SQUARE, "fro"),
        "linalg_householder_product": (_SQUARE, _VECTOR),
        "linalg_matrix_norm": (_SQUARE, 1),
        "linalg_matrix_norm.str_ord": (_SQUARE, "fro"),
        "linalg_matrix_rank.atol_rtol_tensor": (_SQUARE, _f(), _f()),
        "linalg_matrix_rank.tol_tensor": (_SQUARE, _f()),
        "linalg_tensorinv": (_f(2, 2, 4), 2),
        "linalg_tensorsolve": (_f(2, 2, 4), _f(2, 2)),
        "lu_solve": (_SQUARE, _SQUARE, Fixed((4,), torch.int32)),
        "orgqr": (_SQUARE, _VECTOR),
        "ormqr": (_SQUARE, _VECTOR, _SQUARE),
        # The rest
        "fake_quantize_per_tensor_affine": (_SQUARE, 0.1, 0, 0, 255),
        "index_copy": (_SQUARE, 0, _i(4), _SQUARE),
        "index_put": (_SQUARE, [_i(2)], _f(2, 4)),
        "nanquantile": (_SQUARE, _f()),
        "nanquantile.scalar": (_SQUARE, 0.5),
        "quantile": (_SQUARE, _f()),
        "quantile.scalar": (_SQUARE, 0.5),
        "scatter_add": (_SQUARE, 0, _i(4, 4), _SQUARE),
        "stft": (_f(16), 4, None, None, _f(4), False, True, True),
        "stft.center": (_f(16), 4, None, None, _f(4), True, "reflect", False, True, True),
        "view_as_complex": (_f(4, 2),),
    }
)
"""Arguments by operator of the ``aten`` namespace, with its overload or for all of them."""
