"""Users of this library are shown no deprecation of what they have not called."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_script
from amp_script.lowering.composites import registry
from amp_script.undeprecated import compiling_quietly


def _helper(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with amp_script.autocast("cpu", dtype=torch.bfloat16):
            y = torch.einsum("ij,kj->ik", x, x)
        return _helper(self.layer(x, x, x)[0]) + y.sum()


def test_no_deprecation_is_shown(tmp_path: Path) -> None:
    registry._compiled.cache_clear()
    x = torch.rand(3, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scripted = amp_script.script(_Net().eval())
        scripted(x)
        frozen = amp_script.trace_and_freeze(_Net().eval(), x, check_inputs=[torch.rand(5, 8)])
        for name, module in (("scripted.pt", scripted), ("frozen.pt", frozen)):
            amp_script.save(module, tmp_path / name)
            amp_script.load(tmp_path / name)(x)
        amp_script.lower(tmp_path / "scripted.pt")
        amp_script.generate_stub(scripted, "Net")


@pytest.mark.skipif(torch.__version__ < "2.13", reason="nothing is deprecated in older torch")
def test_users_own_calls_are_warned_of() -> None:
    with compiling_quietly(), pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit"):
        torch.jit.script(_helper)
