"""Losses: ``cross_entropy_loss``, ``nll_loss_nd``, ``soft_margin_loss`` into a given tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from .registry import decomposes

# Reductions are numbers to operators: 0 none, 1 mean, 2 sum.


@decomposes("aten::nll_loss_nd")
def _nll_loss_nd(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    assert self.dim() >= 1, "Expected 1 or more dimensions"
    if self.dim() != 1:
        assert self.size(0) == target.size(0), "Expected input batch_size to match target's"
    if self.dim() <= 2:
        return torch.ops.aten.nll_loss(self, target, weight, reduction, ignore_index)
    if self.dim() == 4:
        return torch.ops.aten.nll_loss2d(self, target, weight, reduction, ignore_index)
    assert list(target.shape[1:]) == list(self.shape[2:]), "Expected target of input's size"
    last = [1, -1] if self.numel() > 0 else [0, 0]
    input = self.contiguous().view([self.size(0), self.size(1)] + last)
    last = [1, -1] if target.numel() > 0 else [0, 0]
    flat = target.contiguous().view([self.size(0)] + last)
    loss = torch.ops.aten.nll_loss2d(input, flat, weight, reduction, ignore_index)
    return loss.view([self.size(0)] + list(self.shape[2:])) if reduction == 0 else loss


def _spread(weight: Tensor, like: Tensor, dim: int) -> Tensor:
    """View weights of classes so that they stand along one dimension of another tensor."""
    shape = [1] * like.dim()
    shape[dim] = weight.size(0)
    return weight.view(shape)


def _with_probabilities(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> Tensor:
    dim = 0 if self.dim() == 1 else 1
    classes = self.size(dim)
    input = torch.log_softmax(self, dim, dtype=self.dtype)
    if label_smoothing > 0.0:
        assert label_smoothing <= 1.0, "label_smoothing must be between 0.0 and 1.0"
        target = target * (1 - label_smoothing) + label_smoothing / classes
    terms = input * target
    if weight is not None:
        assert weight.dim() == 1, "cross_entropy: weight should be 1D"
        assert weight.numel() == classes, "cross_entropy: weight should have one for each class"
        terms = terms * (_spread(weight, input, 1) if input.dim() > 1 else weight)
    if reduction == 0:
        return -terms.sum([dim])
    if reduction == 2:
        return -terms.sum()
    if input.numel() == 0:
        return -terms.sum().fill_(float("nan"))
    return -terms.sum() / (input.numel() // classes)


def _with_smoothing(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    dim = 0 if self.dim() == 1 else 1
    input = torch.log_softmax(self, dim, dtype=self.dtype)
    likelihood = torch.ops.aten.nll_loss_nd(input, target, weight, reduction, ignore_index)
    if weight is None:
        smooth = -input.sum([dim])
    else:
        smooth = -(input * _spread(weight, input, dim)).sum([dim])
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    if reduction == 1:
        if weight is None:
            smooth = smooth.sum() / ignored.logical_not().sum()
        else:
            kept = target.masked_select(ignored.logical_not()).flatten()
            smooth = smooth.sum() / weight.gather(0, kept).sum()
    elif reduction == 2:
        smooth = smooth.sum()
    return (1 - label_smoothing) * likelihood + smooth * (label_smoothing / input.size(dim))


@decomposes("aten::cross_entropy_loss")
def _cross_entropy_loss(
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    if self.shape == target.shape:
        assert target.is_floating_point(), "Expected floating point class probabilities"
        assert ignore_index < 0, "ignore_index is not supported for floating point target"
        return _with_probabilities(self, target, weight, reduction, label_smoothing)
    if label_smoothing > 0.0:
        assert label_smoothing <= 1.0, "label_smoothing must be between 0.0 and 1.0"
        return _with_smoothing(self, target, weight, reduction, ignore_index, label_smoothing)
    dim = 0 if self.dim() == 1 else 1
    return torch.ops.aten.nll_loss_nd(
        torch.log_softmax(self, dim, dtype=self.dtype), target, weight, reduction, ignore_index
    )


@decomposes("aten::soft_margin_loss.out")
def _soft_margin_loss_out(self: Tensor, target: Tensor, reduction: int, out: Tensor) -> Tensor:
    torch.neg(self, out=out).mul_(target).exp_().log1p_()
    if reduction != 0:
        reduced = out.mean() if reduction == 1 else out.sum()
        out.resize_([])
        out.copy_(reduced)
    return out
