"""Overloads that write into a tensor they are given, by way of the operator that returns one.

Autocast knows none of these overloads. Most compute into the given tensor at once and have nothing
inside to cast; the kernels of those here call the operator without ``out``, where autocast casts,
and copy its result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes, decomposes_text

_SAME_DTYPE = """
def write({parameters}, out: Tensor) -> Tensor:
    result = torch.ops.aten.{name}({arguments})
    assert result.dtype == out.dtype, "the output has another dtype than the result"
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)
"""
_ANY_DTYPE = """
def write({parameters}, out: Tensor) -> Tensor:
    result = torch.ops.aten.{name}({arguments})
    assert out.is_complex() or not result.is_complex(), "the output cannot hold complex numbers"
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)
"""
_WRITING = {
    _SAME_DTYPE: (
        "_convolution.out",
        "binary_cross_entropy_with_logits.out",
        "conv_tbc.out",
        "convolution.out",
        "dist.out",
        "dot.out",
        "grid_sampler_2d.out",
        "grid_sampler_3d.out",
        "linalg_matrix_norm.out",
        "linalg_matrix_norm.str_ord_out",
        "linalg_norm.ord_str_out",
        "linalg_norm.out",
        "norm.Scalar_out",
        "nuclear_norm.dim_out",
        "nuclear_norm.out",
        "prod.out",
        "sum.out",
        "tensordot.out",
        "trace.out",
        "upsample_bilinear2d.vec_out",
        "upsample_nearest2d.vec_out",
    ),
    _ANY_DTYPE: (
        "cholesky.out",
        "cholesky_solve.out",
        "linalg_cond.out",
        "linalg_cond.p_str_out",
        "linalg_pinv.atol_rtol_float_out",
        "linalg_pinv.atol_rtol_tensor_out",
        "linalg_pinv.out",
        "linalg_pinv.out_rcond_tensor",
        "linalg_tensorinv.out",
        "linalg_tensorsolve.out",
        "mvlgamma.out",
    ),
}


def _register(operator: str, template: str) -> None:
    if not torch._C._dispatch_has_kernel("aten::" + operator):
        return  # other versions of torch have it
    schema = torch._C._get_schema("aten::" + operator.partition(".")[0], operator.partition(".")[2])
    arguments = [argument for argument in schema.arguments if not argument.is_out]
    text = template.format(
        name=schema.name.partition("::")[2],
        parameters=", ".join(f"{each.name}: {each.type.annotation_str}" for each in arguments),
        arguments=", ".join(
            f"{each.name}={each.name}" if each.kwarg_only else each.name for each in arguments
        ),
    )
    decomposes_text("aten::" + operator, text, {"torch": torch})


for _template, _operators in _WRITING.items():
    for _operator in _operators:
        _register(_operator, _template)


@decomposes("aten::inner.out")
def _inner_out(self: Tensor, other: Tensor, out: Tensor) -> Tensor:
    if self.dim() == 0 or other.dim() == 0:
        return torch.mul(self, other, out=out)
    assert self.size(-1) == other.size(-1), "inner() the last dimension must match"
    return torch.ops.aten.tensordot(self, other, [-1], [-1], out=out)


@decomposes("aten::matmul.out")
def _matmul_out(self: Tensor, other: Tensor, out: Tensor) -> Tensor:
    if self.dim() == 1 and other.dim() == 1:
        return torch.dot(self, other, out=out)
    return torch.matmul(self, other, out=out)
