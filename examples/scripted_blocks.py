"""Autocast blocks in a scripted module: branches, a loop, a block inside a block, and a caller's.

    python examples/scripted_blocks.py

TorchScript keeps what a trace cannot, control flow that depends on values. What it does by itself
about autocast is not what eager mode does; ``amp_script.script`` makes it so.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

import amp_script
from amp_script import autocast


class Refine(nn.Module):
    """Refines an estimate until it is good enough, in steps of lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(16, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the estimate, shape (batch, 16), and how many steps it took."""
        steps = 0
        good = False
        while steps < 8 and not good:
            with autocast("cpu", dtype=torch.bfloat16):
                x = x + self.step(x).tanh() / 2
                with autocast("cpu", enabled=False):
                    # A decision is taken in float32.
                    good = bool(self.score(x.float()).mean() > 0.2)
            steps += 1
        return x, steps


def main() -> None:
    """Script, save, load, and compare with eager mode, inside and outside of a region."""
    torch.manual_seed(0)
    eager = Refine().eval()
    scripted = amp_script.script(eager)
    inputs = torch.randn(6, 4, 16)

    equal = True
    with torch.no_grad():
        for x in inputs:
            for caller in (False, True):
                # A scripted module follows the region that it is called in, as eager code does.
                with autocast("cpu", torch.bfloat16, enabled=caller):
                    got, want = scripted(x), eager(x)
                equal = equal and got[1] == want[1] and torch.equal(got[0], want[0])
        steps = sorted({scripted(x)[1] for x in inputs})
        with tempfile.TemporaryDirectory() as folder:
            amp_script.save(scripted, Path(folder) / "refine.pt")
            loaded = torch.jit.load(Path(folder) / "refine.pt")
        equal = equal and all(torch.equal(loaded(x)[0], eager(x)[0]) for x in inputs)
    print(f"the loop ran {', '.join(map(str, steps))} times")
    print(f"scripted, saved and loaded {'equal' if equal else 'differ from'} eager mode to the bit")
    raise SystemExit(not equal)


if __name__ == "__main__":
    main()
