"""Train a scripted module that holds an autocast region and a custom autograd function.

    python examples/train_scripted.py [--steps 20] [--processes 2]

The same steps are taken with the eager module. Loss and gradients are equal to the bit at every
step, which plain ``torch.jit.script`` does not give: it drops casts, and from the second run on it
differentiates sigmoid and tanh by formulas of its own.

With several processes each has its own part of the data, and DistributedDataParallel takes the mean
of their gradients.
"""

from __future__ import annotations

import argparse
import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

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


def train(model: nn.Module, steps: int, rank: int = 0) -> list[torch.Tensor]:
    """Take steps on made-up data of a process's own, and return every loss and gradient."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
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


def train_both(rank: int, steps: int, processes: int, meeting: str) -> None:
    """Train the scripted and the eager module in one process, and compare them.

    Raises:
        SystemExit: a loss or a gradient differs.
    """
    torch.manual_seed(0)
    eager: nn.Module = Classifier()
    scripted: nn.Module = amp_script.script(copy.deepcopy(eager))
    if processes > 1:
        distributed.init_process_group("gloo", meeting, rank=rank, world_size=processes)
        eager, scripted = DistributedDataParallel(eager), DistributedDataParallel(scripted)
    got, want = train(scripted, steps, rank), train(eager, steps, rank)
    equal = all(map(torch.equal, got, want))
    # One write for the line and its end, or those of other processes would come between them.
    sys.stdout.write(
        f"process {rank}: {steps} steps, loss {want[0]:.3f} to {want[-len(want) // steps]:.3f}; "
        f"losses and gradients {'equal' if equal else 'differ from'} eager autocast's to the bit\n"
    )
    if processes > 1:
        # A process that leaves first keeps the others waiting.
        distributed.barrier()
        # The parallel modules go first: where Python frees a group with the last of them, it waits
        # for the group's threads while they may wait for Python.
        del eager, scripted
        distributed.destroy_process_group()
    if not equal:
        raise SystemExit(1)


def main() -> None:
    """Train in as many processes as asked for."""
    parser = argparse.ArgumentParser(description="Train a scripted module under autocast.")
    parser.add_argument("--steps", type=int, default=20, help="how many steps to take")
    parser.add_argument("--processes", type=int, default=1, help="how many processes to train in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.steps, options.processes, f"file://{Path(folder) / 'meeting'}")
        if options.processes == 1:
            train_both(0, *arguments)
        else:
            multiprocessing.spawn(train_both, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
