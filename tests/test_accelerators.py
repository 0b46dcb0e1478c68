"""Scripting, tracing, files and training on each device that is here, in both lower precisions.

The CPU is always here, so that the tests themselves are tested. On a machine with a GPU:

    pytest tests/test_accelerators.py
    python benchmarks/lowering.py --device cuda
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import assert_same
from torch import nn

import amp_script
from amp_script import custom_bwd, custom_fwd

DTYPES = (torch.float16, torch.bfloat16)
STEPS = 4

_HERE: dict[str, Callable[[], bool]] = {
    "cpu": lambda: True,
    "cuda": torch.cuda.is_available,
    "xpu": torch.xpu.is_available,
    "mps": torch.backends.mps.is_available,
}


@pytest.fixture(params=_HERE)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if not _HERE[name]():
        pytest.skip(f"there is no {name} device here")
    return name


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    kind: torch.dtype = request.param
    if device == "cuda" and kind is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        pytest.skip("this GPU has no bfloat16")
    return kind


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    """Kernels that give the same bits each time, with the same algorithm for the same sizes."""
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        yield


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3))).softmax(-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.flatten(2))


class Composites(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bchw,bdhw->bcd", x, x)
        return torch.tensordot(y, y, dims=([2], [2])) + torch.linalg.matrix_norm(y).sum()


MODELS = {
    "convolutions": (Vision, (2, 3, 8, 8)),
    "attention": (Attention, (2, 3, 4, 4)),
    "composites": (Composites, (2, 3, 4, 4)),
}


def _made(name: str, device: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    kind, shape = MODELS[name]
    return kind().eval().to(device), torch.randn(shape).to(device)


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_model(name: str, device: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = _made(name, device)
    frozen = amp_script.trace_and_freeze(
        model, x, device_type=device, dtype=dtype, compute="native", fold_batch_norm=False
    )
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = amp_script.load(tmp_path / "model.pt", compute="native")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with torch.autocast(device, dtype=dtype):
                want = model(x).detach()
            for _ in range(3):
                assert_same(frozen(x).detach(), want)
            assert_same(loaded(x).detach(), want)
            assert_same(torch.jit.load(str(tmp_path / "model.pt"))(x).detach(), want)


class Regions(nn.Module):
    """Regions of the device, of the CPU and of none, in one program that may be moved."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.device, self.dtype = device, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=self.dtype):
            y = self.first(x)
            with torch.autocast(self.device, enabled=False):
                z = torch.mm(y.float(), y.float().t())
            y = torch.einsum("ij,jk->ik", z, y)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.second(y.float()).softmax(-1)


@pytest.mark.parametrize("ambient", [False, True])
def test_a_scripted_module_that_is_moved(device: str, dtype: torch.dtype, ambient: bool) -> None:
    torch.manual_seed(0)
    model = Regions(device, dtype)
    scripted = amp_script.script(model)
    for place in ("cpu", device, "cpu"):
        model.to(place)
        scripted.to(place)
        x = torch.linspace(-1, 1, 64).reshape(4, 16).to(place)
        for _ in range(3):
            with torch.no_grad(), torch.autocast(device, dtype=dtype, enabled=ambient):
                want = model(x)
                assert_same(scripted(x), want)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Trained(nn.Module):
    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)
        self.device, self.dtype = device, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=self.dtype):
            return self.second(torch.sigmoid(self.first(x)) + torch.tanh(self.first(x)))


@pytest.mark.parametrize("ambient", [False, True])
def test_training_with_a_scaler(device: str, dtype: torch.dtype, ambient: bool) -> None:
    class OnDevice(Scaled):
        forward = staticmethod(custom_fwd(Scaled.forward, device_type=device))
        backward = staticmethod(custom_bwd(Scaled.backward, device_type=device))

    torch.manual_seed(0)
    eager = Trained(device, dtype).to(device)
    trained = [eager, amp_script.script(copy.deepcopy(eager))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in trained]
    scalers = [torch.amp.GradScaler(device, init_scale=256.0) for _ in trained]
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(8, 16).to(device)
        losses = []
        for model, optimizer, scaler in zip(trained, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(device, dtype=dtype, enabled=ambient):
                loss = OnDevice.apply(model(x)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        assert_same(losses[1], losses[0])
        for ours, theirs in zip(trained[1].parameters(), eager.parameters(), strict=True):
            assert_same(ours.grad, theirs.grad)
            assert_same(ours.detach(), theirs.detach())


def test_where_the_device_is_decided_at_run_time(device: str, dtype: torch.dtype) -> None:
    """One program, compiled before it is known where its inputs will be."""

    class Either(nn.Module):
        def __init__(self, device: str, dtype: torch.dtype) -> None:
            super().__init__()
            self.device, self.dtype = device, dtype

        def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
            with torch.autocast(self.device, dtype=self.dtype):
                return torch.mm(x, x if other is None else other)

    model = Either(device, dtype)
    scripted = amp_script.script(model)
    for place in ("cpu", device):
        x = torch.linspace(-1, 1, 16).reshape(4, 4).to(place)
        assert_same(scripted(x), model(x))
        assert_same(scripted(x, x.double().float()), model(x, x.double().float()))
