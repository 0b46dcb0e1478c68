"""Train a scripted module that holds an autocast region and a custom autograd function.

    python examples/train_scripted.py [--steps 20]

The same steps are taken with the eager module. Loss and gradients are equal to the bit at every
step, which plain ``torch.jit.script`` does not give: it drops casts, and from the second run on it
differentiates sigmoid and tanh by formulas of its own.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from torch import nn

import amp_script


class ScaledProduct(torch.autograd.Function):
    """A product in float32, whatever the region around it: what sums many terms needs the bits."""

    @staticmethod
    @amp_script.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight``, shape (batch, out), in float32."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @amp_script.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of both arguments."""
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Classifier(nn.Module):
    """A small network for 8x8 images of 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64), nn.Sigmoid())
        self.head = nn.Parameter(torch.randn(64, 10) / 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the classes' scores, shape (batch, 10)."""
        with amp_script.autocast("cpu", dtype=torch.bfloat16):
            return ScaledProduct.apply(self.body(images.flatten(1)), self.head)


def train(model: nn.Module, steps: int) -> list[torch.Tensor]:
    """Take steps on made-up data, and return every loss and gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    seen = []
    for _ in range(steps):
        classes = torch.randint(10, (32,), generator=generator)
        images = torch.rand(32, 8, 8, generator=generator) + classes[:, None, None] / 10
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
        seen += [
            parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
        ]
    return seen


def main() -> None:
    """Train both and compare them."""
    parser = argparse.ArgumentParser(description="Train a scripted module under autocast.")
    parser.add_argument("--steps", type=int, default=20, help="how many steps to take")
    steps = parser.parse_args().steps

    torch.manual_seed(0)
    eager = Classifier()
    scripted = amp_script.script(copy.deepcopy(eager))
    got, want = train(scripted, steps), train(eager, steps)
    equal = all(map(torch.equal, got, want))
    print(f"{steps} steps, loss {want[0]:.3f} to {want[-len(want) // steps]:.3f}")
    print(f"losses and gradients {'equal' if equal else 'differ from'} eager autocast's to the bit")
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
