"""Operators that autocast does not know but whose kernels call operators that it does.

``torch.tensordot`` has no autocast kernel on CPU; its kernel calls ``mm``, which has one. In eager
mode the product is therefore cast, inside. In a TorchScript graph ``tensordot`` is one node, and
nothing casts inside a kernel. Here each such operator has a decomposition, a TorchScript function
that calls what the kernel calls, and :func:`expand_composites` puts it in the operator's place.
"""

from . import (
    contraction,
    convolution,
    interpolation,
    linalg,
    losses,
    normalization,
    outputs,
    padding,
    pointwise,
    recurrent,
    sparse,
    statistics,
    transformer,
)
from .expand import expand_composites
from .registry import Decomposition, decomposes, decomposition, decompositions

__all__ = [
    "Decomposition",
    "contraction",
    "convolution",
    "decomposes",
    "decomposition",
    "decompositions",
    "expand_composites",
    "interpolation",
    "linalg",
    "losses",
    "normalization",
    "outputs",
    "padding",
    "pointwise",
    "recurrent",
    "sparse",
    "statistics",
    "transformer",
]
