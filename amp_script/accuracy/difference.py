"""How far the tensors of a result are from those of another."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import total_ordering

import torch

__all__ = ["Difference", "difference", "nonfinite"]


@total_ordering
@dataclass(frozen=True)
class Difference:
    """How far a result is from what it should be; of several tensors the worst of each.

    What is no finite number in either of the two counts in ``infinities`` and ``nans`` alone.
    Differences are ordered: one with more of those is the greater, then the one with the larger
    relative error.

    Attributes:
        relative: norm of the difference over the norm of what it should be, or the norm of the
            difference where that is zero; for integers and bools the share of elements that differ.
        largest: largest absolute difference of two elements.
        infinities: how many elements are infinite that should not be: in float16, overflow.
        nans: how many elements are NaN that should not be.
    """

    relative: float = 0.0
    largest: float = 0.0
    infinities: int = 0
    nans: int = 0

    @property
    def nonfinite(self) -> int:
        """How many elements are no finite numbers and should be."""
        return self.infinities + self.nans

    def __lt__(self, other: Difference) -> bool:
        """Whether this is the smaller one."""
        return (self.nonfinite, self.relative) < (other.nonfinite, other.relative)

    def __str__(self) -> str:
        """The relative error in percent, and what is no finite number."""
        lost = [
            f"{count:,} {what}"
            for count, what in ((self.infinities, "infinite"), (self.nans, "NaN"))
            if count
        ]
        return ", ".join([*lost, self.percent])

    @property
    def percent(self) -> str:
        """The relative error for people."""
        percent = 100 * self.relative
        return f"{percent:.2g}%" if percent < 99.5 else f"{percent:,.0f}%"


def difference(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
) -> Difference | None:
    """Compare tensors by name; those that only one side has, or in other sizes, are left out.

    Returns:
        None where nothing can be compared.
    """
    each = [
        _of_tensors(tensor, wanted[name])
        for name, tensor in found.items()
        if name in wanted and _sizes(tensor) == _sizes(wanted[name])
    ]
    return _worst(each) if each else None


def _sizes(tensor: torch.Tensor) -> Sequence[torch.Size]:
    return [part.shape for part in tensor.unbind()] if tensor.is_nested else [tensor.shape]


def _worst(each: Iterable[Difference]) -> Difference:
    rows = [(d.relative, d.largest, d.infinities, d.nans) for d in each]
    relative, largest, infinities, nans = zip(*rows, strict=True)
    return Difference(max(relative), max(largest), sum(infinities), sum(nans))


def nonfinite(tensors: Iterable[torch.Tensor]) -> int:
    """How many elements of tensors are infinite or NaN."""
    return sum(int((~_computable(tensor).isfinite()).sum()) for tensor in tensors)


def _of_tensors(found: torch.Tensor, wanted: torch.Tensor) -> Difference:
    if found.numel() == 0:
        return Difference()
    found, wanted = (_real(_computable(tensor)) for tensor in (found, wanted))
    if not (found.is_floating_point() or wanted.is_floating_point()):
        share = float((found != wanted).double().mean())
        return Difference(share, float((found.double() - wanted.double()).abs().max()))
    wide = torch.promote_types(torch.promote_types(found.dtype, wanted.dtype), torch.float32)
    found, wanted = found.to(wide), wanted.to(wide)
    apart = found - wanted
    if not apart.isfinite().all():
        return _of_finite_elements(found, wanted)
    return Difference(_relative(apart, wanted), float(apart.abs().max()))


def _of_finite_elements(found: torch.Tensor, wanted: torch.Tensor) -> Difference:
    """The same where some elements are no finite numbers, or too far apart for their dtype."""
    should_be_finite = wanted.isfinite()
    both = should_be_finite & found.isfinite()
    apart = torch.where(both, found.double() - wanted.double(), 0)
    return Difference(
        _relative(apart, torch.where(both, wanted, 0)),
        float(apart.abs().max()),
        infinities=int((found.isinf() & should_be_finite).sum()),
        nans=int((found.isnan() & ~wanted.isnan()).sum()),
    )


def _relative(apart: torch.Tensor, wanted: torch.Tensor) -> float:
    norm, scale = _norm(apart)
    size, its_scale = _norm(wanted)
    return norm / size * (scale / its_scale) if norm and size else norm * scale


def _norm(tensor: torch.Tensor) -> tuple[float, float]:
    """A norm as a multiple of a scale, so that no square overflows or vanishes in float64."""
    scale = 1.0
    if tensor.dtype is torch.float64:
        _, exponent = math.frexp(float(tensor.abs().max()))
        scale = math.ldexp(1.0, exponent - 1)
        tensor = tensor / scale
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)), scale


def _computable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a tensor that torch computes with: strided, in a dtype with operators."""
    tensor = tensor.detach()
    if tensor.is_nested:
        tensor = torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.device.type == "mps":  # which has no float64
        tensor = tensor.cpu()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_floating_point() and tensor.element_size() == 1:
        return tensor.float()
    return tensor


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
