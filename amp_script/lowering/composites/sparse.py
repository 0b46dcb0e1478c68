"""Products with a sparse matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes
from .types import Number


def _is_sparse(matrix: Tensor) -> bool:
    return matrix.layout != torch.strided


@decomposes("aten::_sparse_addmm")
def _sparse_addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Number, alpha: Number) -> Tensor:
    return torch.addmm(self, mat1, mat2, beta=beta, alpha=alpha)


@decomposes("aten::_sparse_mm")
def _sparse_mm(sparse: Tensor, dense: Tensor) -> Tensor:
    if sparse.is_sparse and dense.is_sparse:
        return torch.ops.aten._sparse_sparse_matmul(sparse, dense)
    shape = [sparse.size(-2), dense.size(-1)]
    if _is_sparse(sparse):
        zeros = torch.zeros(shape, dtype=dense.dtype, device=dense.device)
        return torch.ops.aten._sparse_addmm(zeros, sparse, dense, beta=0, alpha=1)
    zeros = torch.zeros(shape, dtype=sparse.dtype, device=sparse.device)
    turned = torch.ops.aten._sparse_addmm(
        zeros.transpose(-2, -1),
        dense.transpose(-2, -1),
        sparse.transpose(-2, -1),
        beta=0,
        alpha=1,
    )
    return turned.transpose(-2, -1)
