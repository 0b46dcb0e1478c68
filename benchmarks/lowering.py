"""What lowering costs: a scripted module's forward, and lowering itself.

    python benchmarks/lowering.py [--repeats 30] [--device cuda] [--dtype float16]

Forward: the same layers under ``amp_script.script`` with a region, under ``torch.jit.script`` with
every cast written by hand, and under ``torch.jit.script`` with a region and TorchScript's own pass.
Calls are interleaved, and the shortest times compared, which other load on the machine hurts least.
Lowering: of a transformer encoder of 12 layers, against the processor time of ``torch.jit.script``
on it, which compiles it anew each time.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn
from torch.jit import _recursive

import amp_script
from amp_script.scripting.compilation import compile_module
from amp_script.scripting.lowered import _lowered_module
from amp_script.scripting.programs import originals
from amp_script.timing import interleaved


class Layers(nn.Module):
    """Four blocks of attention and two linear layers, as wide as in BERT."""

    __constants__ = ("device", "dtype")

    def __init__(self, device: str, dtype: torch.dtype, width: int = 768, depth: int = 4) -> None:
        super().__init__()
        self.device, self.dtype = device, dtype
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.inputs = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))


class InRegion(Layers):
    """The region around it all."""

    def forward(self, x: torch.Tensor):
        with torch.autocast(self.device, dtype=self.dtype):
            for norm, inputs, outputs, up, down in zip(  # noqa: B905  # TorchScript's has no `strict`
                self.norms, self.inputs, self.outputs, self.ups, self.downs
            ):
                q, k, v = inputs(norm(x)).chunk(3, -1)
                weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 16, -1)
                x = x + outputs(torch.matmul(weights, v))
                x = x + down(torch.nn.functional.gelu(up(x)))
        return x


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype):
    return torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype))


class ByHand(Layers):
    """The same casts, written out."""

    def forward(self, x: torch.Tensor):
        for norm, inputs, outputs, up, down in zip(  # noqa: B905  # TorchScript's has no `strict`
            self.norms, self.inputs, self.outputs, self.ups, self.downs
        ):
            y = norm(x)
            q, k, v = _linear(y, inputs.weight, inputs.bias, self.dtype).chunk(3, -1)
            weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / 16, -1)
            x = x + _linear(torch.matmul(weights, v), outputs.weight, outputs.bias, self.dtype)
            y = torch.nn.functional.gelu(_linear(x, up.weight, up.bias, self.dtype))
            x = x + _linear(y, down.weight, down.bias, self.dtype)
        return x


def forward_times(device: str, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Shortest time of one forward in milliseconds, for 1x128 tokens, without gradients."""
    by_hand, in_region = ByHand(device, dtype).eval(), InRegion(device, dtype).eval()
    in_region.load_state_dict(by_hand.state_dict())
    ways: dict[str, nn.Module] = {
        "amp_script.script": amp_script.script(in_region),
        "cast by hand": torch.jit.script(by_hand),
        "TorchScript's pass": torch.jit.script(in_region),
    }
    for module in ways.values():
        module.to(device)
    x = torch.randn(1, 128, 768, device=device)

    def run(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        way(x)
        if device != "cpu":
            torch.accelerator.synchronize()

    with torch.no_grad():
        times = interleaved(
            {name: lambda way=way: run(way) for name, way in ways.items()}, repeats=repeats
        )
    return {name: 1e3 * each.least for name, each in times.items()}


class Encoder(nn.Module):
    """Twelve layers of torch's own encoder, in a region."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.encoder(x)


def lowering_times(repeats: int) -> dict[str, float]:
    """Median processor time in milliseconds of compiling the encoder, and of lowering it."""
    encoder = Encoder().eval()

    def plain() -> None:
        # Otherwise the second time would find the first one's methods.
        before = _recursive.concrete_type_store
        _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
        try:
            torch.jit.script(encoder)
        finally:
            _recursive.concrete_type_store = before

    compiling, lowering = [], []
    for _ in range(repeats):
        started = time.thread_time()
        plain()
        compiling.append(time.thread_time() - started)
        compiled = compile_module(encoder)
        started = time.thread_time()
        _lowered_module(compiled, originals)
        lowering.append(time.thread_time() - started)
    return {
        "torch.jit.script": 1e3 * statistics.median(compiling),
        "lowering": 1e3 * statistics.median(lowering),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure what lowering costs.")
    parser.add_argument("--repeats", type=int, default=30, help="how often to measure")
    parser.add_argument("--device", default="cpu", help="where the forward runs")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    options = parser.parse_args()
    repeats = options.repeats
    warnings.simplefilter("ignore")

    times = forward_times(options.device, getattr(torch, options.dtype), repeats)
    ours = times["amp_script.script"]
    print("forward, milliseconds")
    for name, each in times.items():
        print(f"  {name:20} {each:8.2f}   ours / this: {ours / each:.3f}")
    times = lowering_times(max(5, repeats // 3))
    print("12-layer encoder, milliseconds of processor time")
    for name, each in times.items():
        print(f"  {name:20} {each:8.1f}")
    print(f"  lowering / torch.jit.script: {times['lowering'] / times['torch.jit.script']:.3f}")


if __name__ == "__main__":
    main()
