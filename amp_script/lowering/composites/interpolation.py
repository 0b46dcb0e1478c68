"""Interpolation: the operators that take either an output size or scale factors."""

from __future__ import annotations

import torch

from .registry import decomposes_text

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
