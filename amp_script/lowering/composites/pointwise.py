"""Element by element and along a dimension: ``square``, ``ldexp``, ``trapezoid`` and others."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .registry import decomposes
from .types import Number


@decomposes("aten::square")
def _square(self: Tensor) -> Tensor:
    return torch.pow(self, 2)


def _power_of_two(self: Tensor, other: Tensor) -> Tensor:
    if self.dtype == torch.float32 or not (self.is_floating_point() or self.is_complex()):
        return torch.pow(2.0, other)
    return torch.full([], 2.0, dtype=self.dtype, device=self.device).pow(other)


@decomposes("aten::ldexp.Tensor")
def _ldexp(self: Tensor, other: Tensor) -> Tensor:
    return torch.mul(self, _power_of_two(self, other))


@decomposes("aten::ldexp_")
def _ldexp_in_place(self: Tensor, other: Tensor) -> Tensor:
    return torch.mul(self, _power_of_two(self, other), out=self)


@decomposes("aten::ldexp.out")
def _ldexp_out(self: Tensor, other: Tensor, out: Tensor) -> Tensor:
    return torch.mul(self, _power_of_two(self, other), out=out)


@decomposes("aten::mvlgamma", "aten::special_multigammaln")
def _mvlgamma(self: Tensor, p: int) -> Tensor:
    if not self.is_floating_point():
        return torch.mvlgamma(self, p)
    assert p >= 1, "p has to be greater than or equal to 1"
    steps = torch.arange(-p * 0.5 + 0.5, 0.5, 0.5, dtype=self.dtype, device=self.device)
    terms = steps.add(self.unsqueeze(-1)).lgamma_()
    return terms.sum([-1]).add_(p * (p - 1) * math.log(math.pi) * 0.25)


@decomposes("aten::mvlgamma_")
def _mvlgamma_in_place(self: Tensor, p: int) -> Tensor:
    assert self.is_floating_point(), "mvlgamma_: the result cannot be cast to the tensor's dtype"
    return self.copy_(_mvlgamma(self, p))


@decomposes("aten::sum_to_size")
def _sum_to_size(self: Tensor, size: list[int]) -> Tensor:
    assert len(size) <= self.dim(), "size is not expandable to the tensor's size"
    leading = self.dim() - len(size)
    for i in range(len(size)):
        assert size[i] == 1 or size[i] == self.size(leading + i), "size is not expandable"
    if len(size) == 0:
        return self.sum()
    dims: list[int] = []
    for dim in range(leading):
        dims.append(dim)
    for i in range(len(size)):
        if size[i] == 1 and self.size(leading + i) != 1:
            dims.append(leading + i)
    result = self.sum(dims, True) if len(dims) > 0 else self
    return result.view(size) if leading > 0 else result


def _differences(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """Distances between sample points, seen as a tensor that broadcasts to ``y``."""
    dim = dim if dim >= 0 else dim + y.dim()
    if x.dim() == 1:
        assert x.size(0) == y.size(dim), "There must be one `x` value for each sample point"
        shape = [1] * y.dim()
        shape[dim] = x.size(0)
        x = x.view(shape)
    elif x.dim() < y.dim():
        x = x.view([1] * (y.dim() - x.dim()) + list(x.shape))
    before = torch.ops.aten.slice(x, dim, 0, -1)
    return torch.ops.aten.slice(x, dim, 1) - before


def _pairs(y: Tensor, dim: int) -> Tensor:
    before = torch.ops.aten.slice(y, dim, 0, -1)
    return before + torch.ops.aten.slice(y, dim, 1)


def _zeros_without(y: Tensor, dim: int) -> Tensor:
    shape = list(y.shape)
    shape.pop(dim)
    return torch.zeros(shape, dtype=y.dtype, device=y.device)


@decomposes("aten::trapezoid.x", "aten::trapz.x")
def _trapezoid_x(y: Tensor, x: Tensor, dim: int) -> Tensor:
    if y.size(dim) == 0:
        return _zeros_without(y, dim)
    return (_pairs(y, dim) * _differences(y, x, dim)).sum([dim]) / 2.0


def _trapezoid_of_step(y: Tensor, dx: float, dim: int) -> Tensor:
    if y.size(dim) == 0:
        return _zeros_without(y, dim)
    return (y.sum([dim]) - (y.select(dim, 0) + y.select(dim, -1)) * 0.5) * dx


@decomposes("aten::trapezoid.dx")
def _trapezoid_dx(y: Tensor, dx: Number, dim: int) -> Tensor:
    return _trapezoid_of_step(y, float(dx), dim)


@decomposes("aten::trapz.dx")
def _trapz_dx(y: Tensor, dx: float, dim: int) -> Tensor:
    return _trapezoid_of_step(y, dx, dim)


@decomposes("aten::cumulative_trapezoid.x")
def _cumulative_trapezoid_x(y: Tensor, x: Tensor, dim: int) -> Tensor:
    return (_pairs(y, dim) * _differences(y, x, dim)).cumsum(dim) / 2.0


@decomposes("aten::cumulative_trapezoid.dx")
def _cumulative_trapezoid_dx(y: Tensor, dx: Number, dim: int) -> Tensor:
    return (float(dx) / 2.0 * _pairs(y, dim)).cumsum(dim)


@decomposes("aten::linalg_vander")
def _linalg_vander(x: Tensor, N: int | None) -> Tensor:  # noqa: N803 -- the operator's own name
    low = x.is_floating_point() and x.dtype != torch.float32 and x.dtype != torch.float64
    assert not low, "linalg.vander supports float, double, complex, and integer tensors"
    x = x.unsqueeze(-1) if x.dim() == 0 else x
    shape = list(x.shape)
    count = shape[-1] if N is None else N
    assert count > 1, "N must be greater than 1."
    powers = torch.cumprod(x.unsqueeze(-1).expand(shape + [count - 1]), -1)
    ones = torch.ones(shape + [1], dtype=powers.dtype, device=powers.device)
    return torch.cat([ones, powers], -1)


@decomposes("aten::vander")
def _vander(x: Tensor, N: int | None, increasing: bool) -> Tensor:  # noqa: N803 -- likewise
    assert x.dim() == 1, "x must be a one-dimensional tensor."
    count = x.size(0) if N is None else N
    assert count >= 0, "N must be non-negative."
    floating = x.is_floating_point() or x.is_complex()
    dtype = x.dtype if floating else torch.int64
    columns = torch.empty([x.size(0), count], dtype=dtype, device=x.device)
    if count > 0:
        columns.select(1, 0).fill_(1)
    if count > 1:
        powers = columns.narrow(1, 1, count - 1)
        powers.copy_(x.unsqueeze(1))
        powers.copy_(torch.cumprod(powers, 1))
    return columns if increasing else torch.flip(columns, [1])


@decomposes("aten::pairwise_distance")
def _pairwise_distance(x1: Tensor, x2: Tensor, p: float, eps: float, keepdim: bool) -> Tensor:
    dim = max(x1.dim(), x2.dim()) - 1
    return torch.ops.aten.norm(x1 - x2 + eps, p, [dim], keepdim)


@decomposes("aten::norm_except_dim")
def _norm_except_dim(v: Tensor, pow: int, dim: int) -> Tensor:
    if dim == -1:
        return torch.ops.aten.norm(v, pow)
    last = v.dim() - 1
    moved = v if dim == 0 or dim == last else v.transpose(0, dim)
    shape = [1] * v.dim()
    if dim == last and dim != 0:
        shape[last] = v.size(last)
        rows = moved.contiguous().view([-1, v.size(last)])
        return torch.ops.aten.norm(rows, pow, [0], False).view(shape)
    shape[0] = moved.size(0)
    rows = moved.contiguous().view([moved.size(0), -1])
    norm = torch.ops.aten.norm(rows, pow, [1], False).view(shape)
    return norm if dim == 0 else norm.transpose(0, dim)


def _fuses_half_weight_norm() -> bool:
    """Whether one kernel normalizes float16 weights as it does others: True in 2.13, not in 2.6."""
    v = torch.tensor([[0.1, 0.2], [0.3, 0.7]], dtype=torch.float16)
    g = torch.tensor([[0.7], [0.3]], dtype=torch.float16)
    return not torch.equal(
        torch.ops.aten._weight_norm(v, g, 0), v * (g / torch.norm_except_dim(v, 2, 0))
    )


def _is_half(v: Tensor, g: Tensor) -> bool:
    return v.dtype == torch.float16 or g.dtype == torch.float16


def _never(v: Tensor, g: Tensor) -> bool:
    return False


_needs_parts = _never if _fuses_half_weight_norm() else _is_half


@decomposes("aten::_weight_norm")
def _weight_norm(v: Tensor, g: Tensor, dim: int) -> Tensor:
    v, g = v.contiguous(), g.contiguous()
    if not _needs_parts(v, g) and (dim == 0 or dim == v.dim() - 1):
        return torch.ops.aten._weight_norm_interface(v, g, dim)[0]
    return v * (g / torch.norm_except_dim(v, 2, dim))
