"""Batch norm is folded in float32 before rounding, and is then as near to float32 as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import amp_script
from amp_script.verification import DISTANCE_RATIO

CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), nn.BatchNorm1d, (4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d, (4, 9, 9)),
    "conv2d, same": (lambda: nn.Conv2d(4, 6, 3, padding="same"), nn.BatchNorm2d, (4, 9, 9)),
    "conv2d, grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d, (4, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(4, 6, 2), nn.BatchNorm3d, (4, 5, 5, 5)),
    "transposed1d": (lambda: nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d, (4, 9)),
    "transposed2d": (lambda: nn.ConvTranspose2d(4, 6, 2, 2), nn.BatchNorm2d, (4, 5, 5)),
    "transposed2d, grouped": (
        lambda: nn.ConvTranspose2d(4, 6, 2, groups=2, bias=False),
        nn.BatchNorm2d,
        (4, 5, 5),
    ),
    "transposed3d": (lambda: nn.ConvTranspose3d(4, 6, 2), nn.BatchNorm3d, (4, 3, 3, 3)),
    "linear": (lambda: nn.Linear(4, 6), nn.BatchNorm1d, (4,)),
    "no affine": (
        lambda: nn.Conv2d(4, 6, 3),
        lambda n: nn.BatchNorm2d(n, affine=False),
        (4, 9, 9),
    ),
    "weight norm": (lambda: weight_norm(nn.Conv2d(4, 6, 3)), nn.BatchNorm2d, (4, 9, 9)),
}


def trained(model: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """Move the statistics and the affine parameters away from where they start."""
    for _ in range(5):
        model(torch.randn(64, *shape) * 3 + 1)
    for parameter in model.parameters():
        parameter.data.mul_(torch.rand_like(parameter) + 0.5)
    return model.eval()


def distances(
    program: Any, model: nn.Module, x: torch.Tensor, dtype: torch.dtype
) -> tuple[float, float]:
    with torch.no_grad():
        full = model(x)
        with torch.autocast("cpu", dtype=dtype):
            want = model(x)
    got = program(x)
    assert got.dtype == want.dtype
    return float((got.float() - full).norm()), float((want.float() - full).norm())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folded_and_as_near_to_float32(name: str, dtype: torch.dtype) -> None:
    layer, norm, shape = CASES[name]
    torch.manual_seed(0)
    model = trained(nn.Sequential(layer(), norm(6)), shape)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(64, *shape)
    frozen = amp_script.trace_and_freeze(model, x, dtype=dtype, compute="native")
    assert not list(frozen.graph.findAllNodes("aten::batch_norm"))
    got, want = distances(frozen, model, torch.randn(64, *shape), dtype)
    assert got <= DISTANCE_RATIO * want
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_not_folded_on_request_and_then_exact() -> None:
    model = trained(nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()), (3, 9, 9))
    x = torch.randn(2, 3, 9, 9)
    frozen = amp_script.trace_and_freeze(model, x, compute="native", fold_batch_norm=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(frozen(x), model(x))


class NotFoldable(nn.Module):
    """Norms that follow no layer, a layer used twice, a product in float32, a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.first, self.exact = nn.BatchNorm2d(3), nn.Conv2d(3, 6, 3)
        self.linear, self.steps = nn.Linear(8, 8), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor, sequence: torch.Tensor) -> tuple[torch.Tensor, ...]:
        used_twice = self.conv(self.first(x))
        with torch.autocast("cpu", enabled=False):
            exact = self.norm(self.exact(x))
        return self.norm(used_twice), used_twice, exact, self.steps(self.linear(sequence))


def test_left_alone_where_folding_would_not_be_exact() -> None:
    model = NotFoldable().eval()
    inputs = torch.randn(2, 3, 9, 9), torch.randn(4, 5, 8)
    frozen = amp_script.trace_and_freeze(model, inputs, compute="native")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(*inputs)
    for a, b in zip(frozen(*inputs), want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_not_folded_where_the_result_would_be_further_from_float32() -> None:
    # One output that rounds badly once folded: eager autocast happens to be exact.
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).eval()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(0.0)
        model[1].weight.fill_(1.0)
        model[1].bias.fill_(0.0)
        model[1].running_mean.fill_(1 / 3)
        model[1].running_var.fill_(1.0 - model[1].eps)
    x = torch.full((1, 1), 1 / 3).bfloat16().float() + 1
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    got, want = distances(frozen, model, x, torch.bfloat16)
    assert got <= DISTANCE_RATIO * want
