"""What decorating and entering a region does to types: nothing is lost."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from typing_extensions import assert_type

import amp_script
from amp_script import autocast, autocast_decorator, custom_bwd, custom_fwd


@autocast("cpu")
def function(x: Tensor, n: int = 1, *, flag: bool = False) -> tuple[Tensor, int]:
    return x, n


@autocast("cpu")
async def coroutine(x: Tensor) -> Tensor:
    return x


@autocast("cpu")
def generator(x: Tensor) -> Iterator[Tensor]:
    yield x


@autocast("cpu")
async def async_generator(x: Tensor) -> AsyncIterator[Tensor]:
    yield x


@overload
def either(x: Tensor) -> Tensor: ...
@overload
def either(x: int) -> int: ...
@autocast("cpu")
def either(x: Tensor | int) -> Tensor | int:
    return x


class Net(nn.Module):
    @autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    @staticmethod
    @autocast("cpu")
    def static(x: Tensor) -> int:
        return 1

    @classmethod
    @autocast("cpu")
    def of_class(cls, x: Tensor) -> "Net":
        return cls()

    @property
    @autocast("cpu")
    def size(self) -> int:
        return 1


def test_functions() -> None:
    x = torch.ones(1)
    assert_type(function(x, 2, flag=True), tuple[Tensor, int])
    assert_type(list(generator(x)), list[Tensor])
    assert_type(asyncio.run(coroutine(x)), Tensor)
    assert_type(either(x), Tensor)
    assert_type(either(1), int)
    assert_type(autocast_decorator(autocast("cpu"), function)(x), tuple[Tensor, int])

    async def collect() -> list[Tensor]:
        return [assert_type(part, Tensor) async for part in async_generator(x)]

    assert len(asyncio.run(collect())) == 1


def test_methods() -> None:
    x = torch.ones(1)
    net = Net()
    assert_type(net.forward(x, 2.0), Tensor)
    assert_type(net.static(x), int)
    assert_type(net.of_class(x), Net)
    assert_type(net.size, int)


def test_regions() -> None:
    with autocast("cpu", torch.bfloat16) as region:
        assert_type(region, autocast)
        assert_type(region.device, str)
        assert_type(region.fast_dtype, torch.dtype)
    with amp_script.jit_autocast_pass(False):
        pass
    assert_type(amp_script.is_autocast_available("cpu"), bool)
    torch_region: torch.autocast = autocast("cpu")
    assert isinstance(torch_region, torch.autocast)


def returns_from_a_region(x: Tensor) -> Tensor:
    with autocast("cpu"):
        return x


class Scale(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: FunctionCtx, x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def plain_forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
    return x


def test_custom_functions() -> None:
    assert_type(returns_from_a_region(torch.ones(1)), Tensor)
    scale: Callable[[Tensor, float], Tensor] = Scale.apply
    assert_type(scale(torch.ones(1), 2.0), Tensor)
    forward: Callable[[FunctionCtx, Tensor], Tensor] = custom_fwd(plain_forward, device_type="cpu")
    assert callable(forward)


if TYPE_CHECKING:
    function("x")  # E: mypy[arg-type] pyright[reportArgumentType]
    function(torch.ones(1), 1, True)  # E: mypy[call-arg] pyright[reportCallIssue]
    Net().forward()  # E: mypy[call-arg] pyright[reportCallIssue]
    Net.static(1)  # E: mypy[arg-type] pyright[reportArgumentType]
    Scale.forward(FunctionCtx(), 1, 2.0)  # E: mypy[arg-type] pyright[reportArgumentType]
    autocast()  # E: mypy[call-arg] pyright[reportCallIssue]
    autocast(0)  # E: mypy[arg-type] pyright[reportArgumentType]
    autocast("cpu", "bfloat16")  # E: mypy[arg-type] pyright[reportArgumentType]
    autocast("cpu")(0)  # E: mypy[type-var] pyright[reportArgumentType]
    custom_fwd(plain_forward)  # E: mypy[call-overload] pyright[reportCallIssue]
