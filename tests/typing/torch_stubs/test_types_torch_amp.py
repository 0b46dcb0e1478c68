"""torch's own autocast, as the stubs type it."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast_decorator
from torch.autograd.function import FunctionCtx
from typing_extensions import assert_type


@torch.autocast("cpu")
def function(x: Tensor, n: int = 1) -> tuple[Tensor, int]:
    return x, n


@torch.amp.autocast("cpu", dtype=torch.bfloat16)
async def coroutine(x: Tensor) -> Tensor:
    return x


@torch.autocast("cpu")
def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


@overload
def either(x: Tensor) -> Tensor: ...
@overload
def either(x: int) -> int: ...
@torch.autocast("cpu")
def either(x: Tensor | int) -> Tensor | int:
    return x


class Net(nn.Module):
    @torch.autocast("cpu")
    def forward(self, x: Tensor) -> Tensor:
        return x


class Scale(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


def returns_from_a_region(x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return x


def test_decorated() -> None:
    x = torch.ones(1)
    assert_type(function(x, 2), tuple[Tensor, int])
    assert_type(asyncio.run(coroutine(x)), Tensor)
    assert_type(list(generator(x)), list[Tensor])
    assert_type(either(1), int)
    assert_type(Net().forward(x), Tensor)
    assert_type(autocast_decorator(torch.autocast("cpu"), function)(x), tuple[Tensor, int])


def test_regions() -> None:
    with torch.autocast("cpu") as region:
        assert_type(region, torch.autocast)
        if torch.__version__ >= "2.10":  # None before
            assert_type(region.device, str)
            assert_type(region.fast_dtype, torch.dtype)
    assert_type(returns_from_a_region(torch.ones(1)), Tensor)
    assert_type(torch.amp.is_autocast_available("cpu"), bool)
    assert_type(torch.cuda.amp.common.amp_definitely_not_available(), bool)


if TYPE_CHECKING:
    assert_type(Scale.forward(FunctionCtx(), torch.ones(1)), Tensor)
    function("x")  # E: mypy[arg-type] pyright[reportArgumentType]
    torch.autocast(0)  # E: mypy[arg-type] pyright[reportArgumentType]
    torch.autocast("cpu")(0)  # E: mypy[type-var] pyright[reportArgumentType]
    torch.amp.custom_fwd(function)  # E: mypy[call-overload] pyright[reportCallIssue]
    Scale.forward(FunctionCtx(), 1)  # E: mypy[arg-type] pyright[reportArgumentType]
