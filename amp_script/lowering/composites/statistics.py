"""Statistics: covariance and correlation."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .registry import decomposes


def _zeroes_single_observation() -> bool:
    """Whether ``cov`` sets its input to zero if that is one observation with one kind of weight.

    True in torch 2.13, where the centred observation is written over the input.
    """
    observation = torch.ones(1, 1)
    torch.cov(observation, correction=0, fweights=torch.ones(1, dtype=torch.int64))
    return not observation.any()


def _centre_in_place(samples: Tensor, mean: Tensor, one_kind_of_weight: bool) -> Tensor:
    if one_kind_of_weight and samples.size(1) == 1:
        return samples.zero_().to(mean.dtype)
    return samples - mean.unsqueeze(1)


def _centre(samples: Tensor, mean: Tensor, one_kind_of_weight: bool) -> Tensor:
    return samples - mean.unsqueeze(1)


_centred = _centre_in_place if _zeroes_single_observation() else _centre


@decomposes("aten::cov")
def _cov(self: Tensor, correction: int, fweights: Tensor | None, aweights: Tensor | None) -> Tensor:
    if self.is_complex() or self.dtype == torch.float64:
        return torch.cov(self, correction=correction, fweights=fweights, aweights=aweights)
    assert self.dim() <= 2, "cov(): expected input to have two or fewer dimensions"
    assert self.dtype != torch.bool, "cov(): bool dtype is not supported for input"
    samples = self.view([1, -1]) if self.dim() < 2 else self
    count = samples.size(1)
    weights: Tensor | None = None
    if fweights is not None:
        assert fweights.dim() <= 1, "cov(): expected fweights to have one or fewer dimensions"
        assert not (fweights.is_floating_point() or fweights.is_complex())
        assert fweights.numel() == count, "cov(): expected a fweight for each observation"
        assert count == 0 or bool(fweights.min().ge(0)), "cov(): fweights cannot be negative"
        weights = fweights
    if aweights is not None:
        assert aweights.dim() <= 1, "cov(): expected aweights to have one or fewer dimensions"
        assert aweights.is_floating_point(), "cov(): expected aweights to be floating point"
        assert aweights.numel() == count, "cov(): expected an aweight for each observation"
        assert count == 0 or bool(aweights.min().ge(0)), "cov(): aweights cannot be negative"
        weights = aweights if weights is None else weights * aweights

    if weights is None:
        total = torch.scalar_tensor(count, dtype=torch.int64, device=samples.device)
        mean = samples.sum([1]) / total
    else:
        total = weights.sum()
        assert bool(total.ne(0)), "cov(): weights sum to zero, can't be normalized"
        mean = (samples * weights).sum([1]) / total
    if weights is not None and aweights is not None and correction != 0:
        norm = total - correction * (weights * aweights).sum() / total
    else:
        norm = total - correction
    if bool(norm.le(0)):
        warnings.warn(
            "cov(): degrees of freedom is <= 0. Correction should be strictly less than the number "
            "of observations.",
            stacklevel=2,
        )
        norm.zero_()

    centred = _centred(samples, mean, (fweights is None) != (aweights is None))
    weighted = centred if weights is None else centred * weights
    product = torch.mm(centred, weighted.t())
    return torch.true_divide(product, norm).squeeze()


@decomposes("aten::corrcoef")
def _corrcoef(self: Tensor) -> Tensor:
    if self.is_complex() or self.dtype == torch.float64:
        return torch.corrcoef(self)
    assert self.dim() <= 2, "corrcoef(): expected input to have two or fewer dimensions"
    covariance = torch.cov(self)
    if covariance.dim() == 0:
        return covariance / covariance
    deviation = torch.sqrt(covariance.diagonal())
    covariance = covariance / deviation.view([-1, 1])
    covariance = covariance / deviation.view([1, -1])
    return covariance.clip(-1, 1)
