"""Linear algebra: powers, pseudo-inverses, norms and determinants of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from .gradients import with_value
from .registry import decomposes
from .types import Number


def _power_factors(self: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Multiply up to the last product of a power of 2 or more, and return its two factors."""
    left, right = self, self
    if n == 3:
        left = torch.matmul(self, self)
    elif n > 3:
        square, product = self, self
        multiplied = False
        while n > 1:
            if n % 2 == 1:
                product = torch.matmul(product, square) if multiplied else square
                multiplied = True
            n = n // 2
            left, right = square, square
            if n > 1 or multiplied:
                square = torch.matmul(left, right)
        if multiplied:
            left, right = product, square
    return left, right


@decomposes("aten::linalg_matrix_power", "aten::matrix_power")
def _matrix_power(self: Tensor, n: int) -> Tensor:
    assert self.dim() >= 2, "linalg.matrix_power: the input must have 2 dimensions or more"
    assert self.size(-1) == self.size(-2), "linalg.matrix_power: the matrices must be square"
    if n == 0:
        identity = torch.eye(self.size(-2), dtype=self.dtype, device=self.device)
        return self.clone(memory_format=torch.contiguous_format).copy_(identity)
    if n == 1:
        return self.clone(memory_format=torch.contiguous_format)
    if n == -1:
        return torch.linalg.inv(self)
    left, right = _power_factors(torch.linalg.inv(self) if n < 0 else self, abs(n))
    return torch.matmul(left, right)


@decomposes("aten::linalg_matrix_power.out", "aten::matrix_power.out")
def _matrix_power_out(self: Tensor, n: int, out: Tensor) -> Tensor:
    assert self.dim() >= 2, "linalg.matrix_power: the input must have 2 dimensions or more"
    assert self.size(-1) == self.size(-2), "linalg.matrix_power: the matrices must be square"
    assert out.is_complex() or not self.is_complex(), "the output cannot hold complex numbers"
    if out.shape != self.shape:
        out.resize_(self.shape)
    if n == 0:
        return out.copy_(torch.eye(self.size(-2), dtype=self.dtype, device=self.device))
    if n == 1:
        return out.copy_(self)
    if n == -1:
        return torch.linalg.inv(self, out=out)
    power = abs(n)
    left, right = _power_factors(torch.linalg.inv(self) if n < 0 else self, power)
    while power > 2 and power % 2 == 0:
        power = power // 2
    if abs(n) > 3 and power <= 2:  # a power of two: the last square is not written in place
        return out.copy_(torch.matmul(left, right))
    return torch.matmul(left, right, out=out)


def _tolerance_dtype(input: Tensor) -> torch.dtype:
    return torch.float32 if input.device.type == "mps" else torch.float64


def _default_rtol(input: Tensor) -> float:
    single = input.dtype == torch.float32 or input.dtype == torch.complex64
    epsilon = 1.1920928955078125e-07 if single else 2.220446049250313e-16
    return epsilon * max(input.size(-1), input.size(-2))


@decomposes("aten::linalg_pinv.atol_rtol_tensor")
def _pinv_atol_rtol_tensor(
    self: Tensor, atol: Tensor | None, rtol: Tensor | None, hermitian: bool
) -> Tensor:
    assert self.dim() >= 2, "linalg.pinv: expected a tensor with 2 or more dimensions"
    if self.dtype != torch.float32:
        return torch.linalg.pinv(self, atol=atol, rtol=rtol, hermitian=hermitian)
    tolerance = _tolerance_dtype(self)
    zero = torch.zeros([], dtype=tolerance, device=self.device)
    for limit in [atol, rtol]:
        if limit is not None and torch.is_grad_enabled():
            assert not limit.requires_grad, "linalg.pinv: tolerances are not differentiable"
    absolute = zero if atol is None else atol
    if rtol is None:
        relative = torch.full([], _default_rtol(self), dtype=tolerance, device=self.device)
        if atol is not None:
            relative = torch.where(atol > 0, zero, relative)
    else:
        relative = rtol

    if self.numel() == 0:
        u, s, v = torch.svd(self)
        return torch.matmul(v * s.reciprocal().unsqueeze(-2), u.mH)
    if hermitian:
        s, u = torch.linalg.eigh(self)
        v, size = u, s.abs()
        largest = size.amax([-1], keepdim=True)
    else:
        u, s, v = torch.svd(self)
        size = s
        largest = s.narrow(-1, 0, 1)
    cutoff = torch.max(absolute.unsqueeze(-1), relative.unsqueeze(-1) * largest)
    none = torch.zeros([], dtype=s.dtype, device=s.device)
    inverse = torch.where(size > cutoff, s.reciprocal(), none).to(self.dtype)
    return torch.matmul(v * inverse.unsqueeze(-2), u.mH)


@decomposes("aten::linalg_pinv.atol_rtol_float")
def _pinv_atol_rtol_float(
    self: Tensor, atol: float | None, rtol: float | None, hermitian: bool
) -> Tensor:
    absolute = 0.0 if atol is None else atol
    relative = 0.0 if absolute > 0.0 else _default_rtol(self)
    if rtol is not None:
        relative = rtol
    tolerance = _tolerance_dtype(self)
    return torch.linalg.pinv(
        self,
        atol=torch.full([], absolute, dtype=tolerance, device=self.device),
        rtol=torch.full([], relative, dtype=tolerance, device=self.device),
        hermitian=hermitian,
    )


@decomposes("aten::linalg_pinv.rcond_tensor")
def _pinv_rcond_tensor(self: Tensor, rcond: Tensor, hermitian: bool) -> Tensor:
    zero = torch.zeros([], dtype=_tolerance_dtype(self), device=self.device)
    return torch.linalg.pinv(self, atol=zero, rtol=rcond, hermitian=hermitian)


@decomposes("aten::linalg_pinv")
def _pinv(self: Tensor, rcond: float, hermitian: bool) -> Tensor:
    return torch.linalg.pinv(self, atol=0.0, rtol=rcond, hermitian=hermitian)


@decomposes("aten::pinverse")
def _pinverse(self: Tensor, rcond: float) -> Tensor:
    return torch.linalg.pinv(self, rcond, False)


def _polar_parts(matrix: Tensor) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.ops.aten.linalg_svd(matrix, False)
    half = vh.mH.matmul(s.unsqueeze(-1) * vh)
    symmetric = half.add(half.mH).mul(0.5)
    unitary = torch.matmul(u, vh)
    return unitary.to(matrix.dtype).contiguous(), symmetric.to(matrix.dtype).contiguous()


@decomposes("aten::linalg_polar")
def _polar(matrix: Tensor) -> tuple[Tensor, Tensor]:
    assert matrix.dim() >= 2, "linalg.polar: the input must have 2 dimensions or more"
    assert matrix.size(-2) >= matrix.size(-1), "linalg.polar: the input must not be wide"
    # Not told apart: single matrices on CUDA where torch finds nvmath-python, and calls that.
    # In lower precision there is no gradient.
    lower = matrix.dtype == torch.bfloat16 or matrix.dtype == torch.float16
    if torch.is_grad_enabled() and matrix.requires_grad and not lower:
        exact_u, exact_h = _polar_parts(matrix.detach())
        u, h = torch.ops.aten.linalg_polar(matrix)
        return with_value(u, exact_u), with_value(h, exact_h)
    return _polar_parts(matrix)


def _write(out: Tensor, result: Tensor) -> None:
    assert out.dtype == result.dtype, "the output has another dtype than the result"
    if out.shape != result.shape:
        out.resize_(result.shape)
    out.copy_(result)


@decomposes("aten::linalg_polar.out")
def _polar_out(matrix: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    u, h = torch.ops.aten.linalg_polar(matrix)
    _write(left, u)
    _write(right, h)
    return left, right


@decomposes("aten::linalg_norm")
def _norm(
    self: Tensor,
    ord: Number | None,
    dim: list[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    if ord is None:
        return torch.linalg.vector_norm(self, 2.0, dim, keepdim, dtype=dtype)
    if dim is None:
        assert self.dim() == 1 or self.dim() == 2, "linalg.norm: the input must be 1D or 2D"
        if self.dim() == 2:
            return torch.linalg.matrix_norm(self, ord, [0, 1], keepdim, dtype=dtype)
    elif len(dim) == 2:
        return torch.linalg.matrix_norm(self, ord, dim, keepdim, dtype=dtype)
    return torch.linalg.vector_norm(self, ord, dim, keepdim, dtype=dtype)


@decomposes("aten::linalg_norm.ord_str")
def _norm_ord_str(
    self: Tensor,
    ord: str,
    dim: list[int] | None,
    keepdim: bool,
    dtype: torch.dtype | None,
) -> Tensor:
    assert dim is not None or self.dim() == 1 or self.dim() == 2, "the input must be 1D or 2D"
    return torch.linalg.matrix_norm(self, ord, [0, 1] if dim is None else dim, keepdim, dtype=dtype)


@decomposes("aten::linalg_vecdot")
def _vecdot(self: Tensor, other: Tensor, dim: int) -> Tensor:
    assert self.dtype == other.dtype, "linalg.vecdot: Expected x and y to have the same dtype"
    assert self.is_floating_point() or self.is_complex(), "linalg.vecdot: Expected floating point"
    if self.dim() == 1 and other.dim() == 1:
        return torch.vdot(self, other)
    return self.conj().mul(other).sum([dim])


@decomposes("aten::linalg_matrix_exp", "aten::matrix_exp")
def _matrix_exp(self: Tensor) -> Tensor:
    if self.dtype == torch.bfloat16 or self.dtype == torch.float16:
        # The first of many steps of the kernel: where autocast changes it, it changes them all.
        norm = self.abs().sum([-2])
        assert norm.dtype == self.dtype, (
            "the exponential of a matrix in lower precision cannot be lowered exactly for this "
            "device; cast the matrix to float32, or call it where autocast is off"
        )
    return torch.linalg.matrix_exp(self)
