"""One model three ways, with the same numbers: TorchScript, torch.export, and AOTInductor.

    python examples/leaving_torchscript.py [--no-compiler]

AOTInductor compiles the exported program to a library that C++ loads without TorchScript. It needs
a C++ compiler here, and takes about half a minute. It fuses operators, and so leaves out roundings
between them; ``emulate_precision_casts`` has it round where eager mode does.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import amp_script


class Scorer(nn.Module):
    """A region around the products, float32 around the region, and a block inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(32, 64), nn.Linear(64, 8), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, shape (batch, 8)."""
        hidden = self.norm(nn.functional.gelu(self.up(x)))
        with amp_script.autocast("cpu", enabled=False):
            hidden = hidden.float() + 1e-3
        return self.down(hidden).softmax(-1)


def main() -> None:
    """Make the three files, run them, and compare them with eager autocast."""
    parser = argparse.ArgumentParser(description="Take a model from TorchScript to torch.export.")
    parser.add_argument("--no-compiler", action="store_true", help="leave AOTInductor out")
    options = parser.parse_args()

    torch.manual_seed(0)
    model, x = Scorer().eval(), torch.randn(4, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        eager = model(x)

    ways = [("TorchScript", torchscript), ("torch.export", exported)]
    ways += [] if options.no_compiler else [("AOTInductor", compiled)]
    equal = True
    for name, make in ways:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            scores = make(model, x, Path(folder))(x)
        same = scores.dtype is eager.dtype and torch.equal(scores, eager)
        print(f"{name:<14}{'equal to eager autocast to the bit' if same else 'differs'}")
        equal = equal and same
    raise SystemExit(not equal)


def torchscript(model: nn.Module, x: torch.Tensor, folder: Path) -> Callable[..., torch.Tensor]:
    """As ``amp-script freeze`` does."""
    amp_script.save(amp_script.trace_and_freeze(model, x, compute="native"), folder / "model.pt")
    return torch.jit.load(folder / "model.pt")


def exported(model: nn.Module, x: torch.Tensor, folder: Path) -> Callable[..., torch.Tensor]:
    """As ``amp-script freeze --format export`` does."""
    torch.export.save(amp_script.export(model, x), folder / "model.pt2")
    return torch.export.load(folder / "model.pt2").module()


def compiled(model: nn.Module, x: torch.Tensor, folder: Path) -> Callable[..., torch.Tensor]:
    """The exported program, compiled to a library."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    file = aoti_compile_and_package(
        amp_script.export(model, x),
        package_path=str(folder / "compiled.pt2"),
        inductor_configs={"emulate_precision_casts": True},
    )
    return aoti_load_package(file)


if __name__ == "__main__":
    main()
