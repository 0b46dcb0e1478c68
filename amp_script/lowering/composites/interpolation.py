"""Interpolation: operators that take either an output size or scale factors; sampling grids."""

from __future__ import annotations

import torch
from torch import Tensor

from .gradients import with_value
from .registry import decomposes, decomposes_text

_INTERPOLATION = """
def upsample(
    input: Tensor,
    output_size: Optional[List[int]],
    {align_parameter}
    scale_factors: Optional[List[float]],
) -> Tensor:
    size: List[int] = []
    scale: List[Optional[float]] = []
    if output_size is not None:
        assert scale_factors is None, "Must specify exactly one of output_size and scale_factors"
        size = output_size
    if scale_factors is not None:
        for dim in range(input.dim() - 2):
            size.append(int(float(input.size(dim + 2)) * scale_factors[dim]))
            scale.append(scale_factors[dim])
    else:
        for dim in range(input.dim() - 2):
            scale.append(None)
    assert len(size) == {dims} and input.dim() == {dims} + 2, "not as many sizes as dimensions"
    return torch.ops.aten.{name}(input, size, {align_argument} {scales})
"""

ALIGNED = {
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_trilinear3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}
NEAREST = {
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
}

for _name, _dims in (ALIGNED | NEAREST).items():
    _text = _INTERPOLATION.format(
        name=_name,
        dims=_dims,
        align_parameter="align_corners: bool," if _name in ALIGNED else "",
        align_argument="align_corners," if _name in ALIGNED else "",
        scales=", ".join(f"scale[{dim}]" for dim in range(_dims)),
    )
    decomposes_text(f"aten::{_name}.vec", _text, {"torch": torch})


def _steps(theta: Tensor, count: int, align_corners: bool) -> Tensor:
    if count <= 1:
        is_lower = theta.dtype == torch.bfloat16 or theta.dtype == torch.float16
        assert not is_lower, "a grid of one step is not implemented in lower precision"
        return torch.zeros([], dtype=theta.dtype, device=theta.device)
    steps = torch.linspace(-1, 1, count, dtype=theta.dtype, device=theta.device)
    return steps if align_corners else steps * (count - 1) / count


def _affine_grid(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    assert len(size) == 4 or len(size) == 5, "AffineGridGenerator needs 4d or 5d inputs."
    dims = len(size) - 2
    shape = [size[0]] + size[2:]
    base = torch.empty(shape + [dims + 1], dtype=theta.dtype, device=theta.device)
    for dim in range(dims):
        steps = _steps(theta, size[len(size) - 1 - dim], align_corners)
        for _ in range(dim):
            steps = steps.unsqueeze(-1)
        base.select(-1, dim).copy_(steps)
    base.select(-1, dims).fill_(1)
    points = 1
    for extent in size[2:]:
        points *= extent
    grid = base.view([size[0], points, dims + 1]).bmm(theta.transpose(1, 2))
    return grid.view(shape + [dims])


@decomposes("aten::affine_grid_generator")
def _affine_grid_generator(theta: Tensor, size: list[int], align_corners: bool) -> Tensor:
    # Of a grid of one step there is no gradient in lower precision.
    if torch.is_grad_enabled() and theta.requires_grad and min(size[2:]) > 1:
        exact = _affine_grid(theta.detach(), size, align_corners)
        # The formula for the gradient computes in the dtype of the result.
        like = theta.to(exact.dtype)
        return with_value(torch.affine_grid_generator(like, size, align_corners), exact)
    return _affine_grid(theta, size, align_corners)
