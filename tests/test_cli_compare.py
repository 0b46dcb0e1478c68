"""``amp-script compare``: its table, plot and JSON, what it advises, and how it refuses."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytest.importorskip("typer", reason="the command needs the extra `cli`")

import amp_script
from amp_script.cli import output
from amp_script.cli.app import run

MODELS = """
    import torch
    from torch import nn


    class Norm(nn.Module):
        def forward(self, x):
            return x / x.square().mean(-1, keepdim=True).sqrt()


    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = nn.Linear(8, 8), Norm()

        def forward(self, x):
            return x + self.norm(1000 * self.up(x))


    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Block(), nn.Linear(8, 2))
    net.add_module("$x$ [y]", nn.Identity())
    net.eval()
    training = nn.Linear(8, 2)


    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("not today")


    failing = Failing().eval()


    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in {
                "first": nn.Linear(8, 8), "a\\x1b[31m\\nb": Norm(), "c\\nd": nn.Linear(8, 8)
            }.items():
                self.add_module(name, module)

        def forward(self, x):
            return self._modules["a\\x1b[31m\\nb"](1000 * self.first(x))


    odd = Odd().eval()


    def batch():
        return {"input": torch.ones(2, 8)}
"""

ARGS = ["compare", "models.py:net", "--input", "4x8", "--dtype", "float16"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder that holds ``models.py``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))
    yield tmp_path
    sys.modules.pop("models", None)


def test_the_culprit_comes_first_and_what_is_advised_mends_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(ARGS) == 0
    shown = capsys.readouterr()
    assert not shown.err  # quiet where nobody is looking
    lines = [line.split() for line in shown.out.splitlines() if line]
    assert " ".join(lines[0]).startswith("float16 on cpu: the result is ")
    assert lines[1][:2] == ["submodule", "class"]
    assert lines[2][:3] == ["1.norm", "Norm", "float16"]
    assert "\nwrap '1.norm' in autocast(enabled=False): " in shown.out
    command = shown.out.splitlines()[-1]
    assert command == "or amp-script freeze ... --keep-float32 1.norm"

    freeze = ["freeze", *ARGS[1:], "-o", "net.pt", *command.split()[-2:]]
    assert run(freeze) == 0
    assert "in float32   '1.norm'" in capsys.readouterr().out
    assert run(["inspect", "net.pt"]) == 0
    assert "in float32        '1.norm'" in capsys.readouterr().out
    assert amp_script.load("net.pt").metadata.keep_float32 == ("1.norm",)
    assert run(["verify", "net.pt", *ARGS[1:4], "--compute", "native", "--exact"]) == 0
    assert run([*ARGS, "--keep-float32", "1.norm"]) == 0
    assert "float16 on cpu, '1.norm' kept: the result is 0.0" in capsys.readouterr().out


def test_names_are_shown_with_escapes_for_what_a_terminal_would_act_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["compare", "models.py:odd", "--input", "4x8", "--dtype", "float16"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert any(line.startswith(r"a\x1b[31m\nb ") for line in shown.splitlines())
    assert r"not called, so not measured by themselves: c\nd" in shown
    assert shown.splitlines()[-1].endswith(r"--keep-float32 'a\x1b[31m\nb'")


def test_json_holds_all_calls(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGS, "--json", "--top", "1", "--no-advise"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [call["name"] for call in found["calls"]] == [
        *("", "0", "1", "1.up", "1.norm", "2", "$x$ [y]")
    ]
    assert found["dtype"] == "float16"
    assert found["advice"] is None
    assert found["calls"][4]["own"].keys() == {"relative", "largest", "infinities", "nans"}


def test_the_table_ends_where_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGS[:2], "--inputs", "models.py:batch", "--top", "2", "--no-advise"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("bfloat16 on cpu")
    assert "and 5 more calls: --top N" in lines
    assert len([line for line in lines if "Linear" in line or "Norm" in line]) <= 2


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="plots need the extra `plot`"
)
def test_plots(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("net.png", "net.svg"):
        assert run([*ARGS, "--no-advise", "--plot", name]) == 0
    assert (folder / "net.png").read_bytes().startswith(b"\x89PNG")
    assert ElementTree.parse(folder / "net.svg").getroot().tag.endswith("svg")
    capsys.readouterr()
    assert run([*ARGS, "--plot", "net.png"]) == 2
    assert "net.png exists: pass --force" in capsys.readouterr().err
    assert run([*ARGS, "--plot", "net.txt"]) == 2
    assert "--plot net.txt: expected a name that ends in" in capsys.readouterr().err
    # Nothing that could be drawn on a logarithmic axis.
    nothing = ["--keep-float32", "", "--plot", "net.png", "--force"]
    assert run([*ARGS, *nothing]) == 0
    assert "nothing to keep in float32" in capsys.readouterr().out


def test_a_plot_without_matplotlib(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run([*ARGS, "--plot", "net.png"]) == 2
    assert "pip install 'amp-script[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["models.py:net"], 2, "give example inputs with --input SPEC"),
        ([*ARGS[1:], "--keep-float32", "norm"], 2, "--keep-float32 norm: it matches no submodule"),
        ([*ARGS[1:], "--dtype", "int8"], 2, "--dtype int8: expected bfloat16 or float16"),
        (["models.py:training", "--input", "4x8"], 1, "the model is in training mode"),
        (["models.py:net", "--input", "4x9"], 1, "the model fails under autocast, in '0' (Linear)"),
        (
            ["models.py:failing", "--input", "4x8"],
            1,
            "the model fails under autocast: RuntimeError: not today",
        ),
        ([*ARGS[1:], "--top", "0"], 2, "--top"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    assert run(["compare", *args]) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_freezing_refuses_a_pattern_by_the_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["freeze", *ARGS[1:], "-o", "net.pt", "--keep-float32", "1.norms"]
    assert run(args) == 2
    shown = capsys.readouterr().err
    assert "--keep-float32 1.norms: it matches no submodule; there are '1.norm'" in shown
    assert not (folder / "net.pt").exists()


def test_stages_show_bars_on_a_terminal_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for terminal in (False, True):
        if terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        with output.stages() as show:
            show("comparing [calls]", 1, 2)
            show("comparing [calls]", 2, 2)
            show("trying", 3, 0)
        shown = capsys.readouterr().err
        assert ("comparing [calls]" in shown) is terminal
        assert ("3/3" in shown) is terminal


def test_random_inputs_are_the_same_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.get_rng_state()
    shown = []
    for _ in range(2):
        assert run([*ARGS, "--json", "--no-advise"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert torch.equal(torch.get_rng_state(), before)
