"""``amp-script lower``: files it writes, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import amp_script
from amp_script.cli.app import run


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layer(x)
        return y, self.layer(x)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.chdir(tmp_path)
    network = Network()
    torch.jit.script(network).save("in.pt")
    return network


def test_it_lowers_regions(network: Network, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lower", "in.pt", "-o", "out.pt"]) == 0
    loaded = torch.jit.load("out.pt")
    x = torch.rand(2, 4)
    for _ in range(3):
        for got, want in zip(loaded(x), network(x), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    assert "autocast_mode" not in str(loaded.inlined_graph)
    assert "out.pt" in capsys.readouterr().out


def test_it_puts_a_region_around_the_program(network: Network) -> None:
    assert run(["lower", "in.pt", "-o", "out.pt", "--dtype", "bfloat16"]) == 0
    first, second = torch.jit.load("out.pt")(torch.rand(2, 4))
    assert (first.dtype, second.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.pt", "-o", "out.pt"], 2, "no file missing.pt to lower"),
        (["in.pt", "-o", "out.pt", "--dtype", "float32"], 2, "expected bfloat16 or float16"),
        (["in.pt", "-o", "out.pt", "--device", "meta"], 2, "'meta', which has no autocast"),
        (["in.pt", "-o", "in.pt"], 2, "pass --force"),
        (["broken.pt", "-o", "out.pt"], 1, "broken.pt: no TorchScript archive"),
        (["frozen.pt", "-o", "out.pt"], 1, "frozen.pt: it is a frozen program, whose casts"),
        (["in.pt"], 2, "--output"),
    ],
)
def test_wrong_command_lines(
    network: Network,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    Path("broken.pt").write_bytes(b"nothing")
    frozen = amp_script.trace_and_freeze(network.layer.eval(), torch.rand(2, 4))
    amp_script.save(frozen, "frozen.pt")
    assert run(["lower", *arguments]) == code
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not Path("out.pt").exists()
