"""``amp-script bench``: the rows it shows, in which form, and what it refuses before it starts."""

from __future__ import annotations

import functools
import json
import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer", reason="the command needs the extra `cli`")

import amp_script
from amp_script.accuracy.difference import Difference, difference
from amp_script.cli import contestants
from amp_script.cli.app import run
from amp_script.metadata import plain
from amp_script.structure import tensors_in

MODELS = """
    import dataclasses

    import torch
    from torch import nn


    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.out = nn.Linear(16, 4)

        def forward(self, batch, *, mask, scale=1.0):
            hidden = self.embed(batch["ids"]) * mask.unsqueeze(-1)
            return {"tags": self.out(hidden) * scale, "kept": mask.sum(-1)}


    class Stateful(nn.Linear):
        def forward(self, x, *others):
            print("called")
            if torch.jit.is_tracing():
                raise ValueError("not while tracing\\nfor reasons")
            return super().forward(x)


    class Normalising(nn.Linear):
        def forward(self, x):
            return super().forward(x.sub_(0.5).div_(0.5))


    @dataclasses.dataclass
    class Output:
        scores: torch.Tensor
        labels: torch.Tensor


    class Labelling(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            return Output(scores, scores.argmax(-1))


    class Labels(Labelling):
        def forward(self, x):
            return super().forward(x).labels


    class Overflowing(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1e6


    torch.manual_seed(0)
    normalising = Normalising(8, 8).eval()
    labelling, labels = Labelling(64, 512).eval(), Labels(64, 512).eval()
    overflowing = Overflowing(8, 8).eval()
    training = nn.Sequential(nn.Linear(8, 8), nn.Dropout())
    tagger = Tagger().eval()
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    other = nn.Linear(9, 2).eval()
    talkative = Stateful(8, 2).eval()
"""

FEW = ["--repeats", "2", "--seconds", "0"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with ``models.py`` and two artifacts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "models", raising=False)
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))
    import models

    amp_script.save(amp_script.trace_and_freeze(models.net, torch.randn(3, 8)), "net.pt")
    batch = {"ids": torch.arange(6).reshape(2, 3)}
    frozen = amp_script.trace_and_freeze(
        models.tagger, (batch,), example_kwargs={"mask": torch.ones(2, 3), "scale": 3.0}
    )
    amp_script.save(frozen, "tagger.pt")
    threads = torch.get_num_threads()
    yield tmp_path
    assert torch.get_num_threads() == threads
    assert logging.root.manager.disable == 0
    del sys.modules["models"]


def _measured(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert run(["bench", *args, *FEW, "--json"]) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_a_file_alone_is_run_by_every_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _measured(capsys, "net.pt")
    assert [way["name"] for way in shown["ways"]] == ["this file", "native", "upcast", "packed"]
    assert shown["inputs"] == [{"name": "input", "dtype": "float32", "shape": [3, 8]}]
    assert shown["region"] == {"device": "cpu", "dtype": "bfloat16"}
    assert shown["rounds"] == 2
    for way in shown["ways"]:
        low, high = way["middle_half_ms"]
        assert 0 < way["least_ms"] <= low <= way["median_ms"] <= high
        assert way["distance_to_float32"] is None


def test_the_model_in_every_way_that_torch_has(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nested and keyword inputs, and one that is held fast, are made from the metadata.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for name in ("onnxruntime", "openvino"):
        monkeypatch.setitem(sys.modules, name, None)
    shown = _measured(capsys, "tagger.pt", "--model", "models.py:tagger", "--threads", "1")
    ways = {way["name"]: way for way in shown["ways"]}
    torchs = ["eager-float32", "eager-autocast", "recipe", "frozen-float32", "compile"]
    assert list(ways) == ["this file", *torchs]
    assert not [way for way in ways.values() if "error" in way]
    distances = {name: way["distance_to_float32"]["relative"] for name, way in ways.items()}
    assert distances["eager-float32"] == 0
    assert distances["frozen-float32"] < 1e-6
    assert 1e-4 < distances["eager-autocast"] < 0.01
    assert distances["this file"] == pytest.approx(distances["eager-autocast"])
    assert 1e-4 < distances["recipe"] < 0.01
    assert shown["threads"] == 1


@pytest.mark.parametrize("name", ["normalising", "labelling", "labels", "overflowing"])
def test_each_way_is_as_far_from_float32_as_eager_torch(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    import models

    model = getattr(models, name)
    x = torch.randn(1000, model.in_features, generator=torch.Generator().manual_seed(0))
    torch.save(x, "x.pt")
    Path("inputs.py").write_text("import torch\nx = torch.load('x.pt')\n")
    dtype = torch.float16 if name == "overflowing" else torch.bfloat16
    amp_script.save(amp_script.trace_and_freeze(model, x.clone(), dtype=dtype), "model.pt")
    with torch.no_grad():
        full = _tensors(model(x.clone()))
        with torch.autocast("cpu", dtype=dtype):
            lower = _tensors(model(x.clone()))
    want = difference(lower, full)
    assert want is not None
    assert want.relative > 0

    args = ["--model", f"models.py:{name}", "--inputs", "inputs.py:x", "--against", "native"]
    for way in ("eager-float32", "eager-autocast", "recipe"):
        args += ["--against", way]
    found = [way["distance_to_float32"] for way in _measured(capsys, "model.pt", *args)["ways"]]
    itself, native, eager, autocast, recipe = found
    assert eager == plain(Difference())
    assert native == autocast == plain(want)
    assert itself["infinities"] == want.infinities
    assert 0 < recipe["relative"] < 0.1
    assert run(["bench", "model.pt", *args, *FEW]) == 0
    assert f"  {want}\n" in capsys.readouterr().out
    assert torch.load("x.pt").equal(x)


def _tensors(result: object) -> dict[str, torch.Tensor]:
    return dict(tensors_in(result, "output"))


def test_where_nothing_can_be_compared_the_cell_is_empty(
    capsys: pytest.CaptureFixture[str],
) -> None:
    args = ["--model", "models.py:labelling", "--input", "3x8", "--against", "eager-autocast"]
    shown = _measured(capsys, "net.pt", *args)
    assert shown["ways"][0]["distance_to_float32"] is None


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_other_runtimes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    for package in contestants.CONTESTANTS[name].packages:
        pytest.importorskip(package, reason="compared with by those who have installed it")
    shown = _measured(capsys, "tagger.pt", "--model", "models.py:tagger", "--against", name)
    _, way = shown["ways"]
    assert way["distance_to_float32"]["relative"] < 1e-6


def test_a_way_that_fails_is_a_row_with_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "models.py:talkative", "--against", "recipe", "--against", "eager-float32"]
    assert run(["bench", "net.pt", *args, *FEW]) == 0
    shown = capsys.readouterr()
    rows = [line.split() for line in shown.out.splitlines()]
    assert ["recipe", "failed"] in rows
    assert "recipe failed  ValueError: not while tracing\n" in shown.out
    assert any(row[0] == "eager-float32" and row[2].replace(".", "").isdigit() for row in rows[:4])
    assert "called" in shown.err


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--model", "models.py:net", "--against", "eager-autocast", "--threads", "1"]
    assert run(["bench", "net.pt", *args, "--input", "5x8", *FEW]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    heading, first, second, *about = shown.out.splitlines()
    assert heading.split("  ")[0] == "milliseconds"
    assert first.startswith("this file")
    assert "1.00" in first
    assert second.startswith("eager-autocast")
    assert {
        line.split("  ")[0]: line.split("  ")[-1].strip() for line in about if line
    }.items() >= {
        "input input": "float32 5x8",
        "region": "bfloat16 on cpu",
        "threads": "1",
        "rounds": "2",
    }.items()


def test_all_means_all_that_can_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _measured(capsys, "net.pt", "--against", "all")
    assert [way["name"] for way in shown["ways"]] == ["this file", "native", "upcast", "packed"]


def test_a_program_without_metadata_of_its_inputs_needs_real_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    amp_script.save(amp_script.script(torch.nn.Linear(8, 2)), "scripted.pt")
    assert run(["bench", "scripted.pt", *FEW]) == 2
    assert "says nothing about its inputs; give some with --input" in capsys.readouterr().err
    shown = _measured(capsys, "scripted.pt", "--input", "3x8")
    assert [way["name"] for way in shown["ways"]] == ["this file"]


def test_a_plan_that_the_file_does_not_have_takes_no_part(
    capsys: pytest.CaptureFixture[str],
) -> None:
    amp_script.save(amp_script.script(torch.nn.Linear(8, 2)), "scripted.pt")
    amp_script.save(amp_script.load("net.pt"), "baked.pt", compute="upcast")
    shown = _measured(capsys, "baked.pt", "--against", "all")
    assert [way["name"] for way in shown["ways"]] == ["this file", "upcast"]
    assert not [way for way in shown["ways"] if "error" in way]
    shown = _measured(capsys, "scripted.pt", "--input", "3x8", "--against", "all")
    assert [way["name"] for way in shown["ways"]] == ["this file"]
    for file, plans in (("scripted.pt", "none"), ("baked.pt", "upcast")):
        assert run(["bench", file, "--against", "packed", *FEW]) == 2
        shown = capsys.readouterr().err
        assert "--against packed: a plan that the file does not have here" in shown
        assert shown.endswith(f"; it has {plans}\n")


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_plot(folder: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra `plot`")
    file = folder / f"times.{suffix}"
    args = ["bench", "net.pt", *FEW, "--plot", str(file)]
    assert run(args) == 0
    assert file.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert run(args) == 2
    assert "exists: pass --force" in capsys.readouterr().err
    assert run([*args, "--force"]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--against", "magic"], "--against magic: expected native, upcast, packed, eager-float32"),
        (["--against", "recipe"], "--against recipe runs the model: name it with --model TARGET"),
        (["--input", "3x"], "input spec '3x', column 3"),
        (["--input", "3x8", "--input", "3x8"], "2 inputs by position: the file takes input"),
        (["--plot", "times.xyz"], "--plot times.xyz: expected a name that ends in ."),
        (["--plot", "no/times.png"], "no folder no to write times.png into"),
        (["--device", "toaster"], "--device toaster: this torch cannot use it"),
        (["--repeats", "0"], "Invalid value for '--repeats'"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert run(["bench", "net.pt", *args]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("package", "args", "message"),
    [
        ("openvino", ["--against", "openvino"], "needs openvino, not installed here: pip install"),
        (
            "matplotlib",
            ["--plot", "t.png"],
            "needs matplotlib, which is not installed: pip install",
        ),
    ],
)
def test_what_is_named_and_not_installed_is_an_error(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    args: list[str],
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["bench", "net.pt", "--model", "models.py:net", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["missing.pt"], "missing.pt: no such file"),
        (["models.py"], "no TorchScript archive"),
        (
            ["net.pt", "--model", "models.py:training"],
            "the model is in training mode (Sequential, 0, 1); call eval() first",
        ),
        (["net.pt", "--input", "3x9"], "mat1 and mat2 shapes cannot be multiplied (3x9 and"),
        (["net.pt", "--input", "y=3x8"], "net.pt itself fails: InputError: forward: expected 1"),
        (
            ["net.pt", "--input", "8"],
            "InputError: forward: wrong input; input: expected float32 tensor of rank 2",
        ),
        (["net.pt", "--model", "models.py:net", "--input", "y=3x8"], "expected (input), given 'y'"),
    ],
)
def test_failures(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert run(["bench", *args, *FEW]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
