"""``amp-script freeze``: files it writes, files it leaves alone, and what it says."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from versions import loads_exported_programs

import amp_script
from amp_script.cli.app import run

MODELS = """
    import time

    import torch
    from torch import nn


    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(100, 16)
            self.out = nn.Linear(16, 4)

        def forward(self, ids, mask):
            hidden = self.embed(ids) * mask.unsqueeze(-1)
            return {"tags": self.out(hidden), "kept": mask.sum(-1)}


    torch.manual_seed(0)
    tagger = Tagger().eval()
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    training = nn.Linear(8, 2)


    def batch():
        return {"ids": torch.arange(6).reshape(2, 3), "mask": torch.ones(2, 3)}


    def pair():
        return torch.arange(6).reshape(2, 3), torch.ones(2, 3)


    def slow():
        print("started", flush=True)
        time.sleep(180)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder that holds ``models.py``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))
    yield tmp_path
    sys.modules.pop("models", None)


def _left_behind(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"models.py", "__pycache__"}


def _eager(target: str, *args: torch.Tensor, **kwargs: torch.Tensor) -> object:
    model = getattr(sys.modules["models"], target)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return model(*args, **kwargs)


def test_writes_a_file_that_plain_torch_loads(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["freeze", "models.py:net", "-o", "net.pt", "--input", "3x8"]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    rows = dict(line.split("  ", 1) for line in shown.out.splitlines())
    assert rows["file"].strip() == "net.pt"
    assert rows["region"].strip().startswith("bfloat16 on cpu")
    assert "float32 3x8" in shown.out
    assert rows["verified"].strip() == "equal to eager autocast to the bit"
    assert _left_behind(folder) == {"net.pt"}

    x = torch.randn(5, 8)
    loaded = torch.jit.load("net.pt")
    expected = _eager("net", x)
    assert isinstance(expected, torch.Tensor)
    with torch.no_grad():
        got = loaded(x)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "inputs",
    [
        ["--inputs", "models.py:batch"],
        ["--inputs", "models:pair"],
        ["--input", "ids=int64[0,100):2x3", "--input", "mask=2x3"],
        ["--input", "int64[0,100):2x3", "--input", "mask=float32[0,1]:2x3"],
    ],
)
def test_inputs_by_position_and_by_name(inputs: list[str]) -> None:
    assert run(["freeze", "models.py:tagger", "-o", "tagger.pt", *inputs]) == 0
    ids, mask = torch.tensor([[5, 9]]), torch.tensor([[1.0, 0.5]])
    expected = _eager("tagger", ids, mask)
    assert isinstance(expected, dict)
    got = amp_script.load("tagger.pt")(ids, mask)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype is tensor.dtype
        assert torch.equal(got[name], tensor)


def test_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["freeze", "models.py:net", "-o", "net.pt", "--input", "3x8", "--dtype", "float16"]
    assert run(args) == 0
    assert "float16 on cpu" in capsys.readouterr().out
    assert torch.jit.load("net.pt")(torch.randn(3, 8)).dtype is torch.float16


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give example inputs with --input SPEC, once for each, or with --inputs MODULE:ATTR"),
        (["--input", "3x8", "--inputs", "models:pair"], "give example inputs with --input SPEC"),
        (["--input", "3x"], "input spec '3x', column 3: expected a size, but the spec ends"),
        (["--input", "a=1", "--input", "a=1"], "two input specs are called 'a'"),
        (["--input", "3x8", "--dtype", "int8"], "--dtype int8: expected bfloat16 or float16"),
        (["--input", "3x8", "--device", "toaster"], "--device toaster: this torch cannot use it"),
        (["--input", "3x8", "-o", "no/net.pt"], "no folder no to write net.pt into"),
        (["--input", "3x8", "-o", "."], ". is a folder: expected the name of a file after -o"),
    ],
)
def test_a_wrong_command_line_runs_no_code_of_the_user(
    folder: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert run(["freeze", "models:net", "-o", "net.pt", *args]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}")
    assert shown.count("\n") == 1
    assert "models" not in sys.modules
    assert not _left_behind(folder)


@pytest.mark.parametrize(
    ("target", "spec", "message"),
    [
        ("models:training", "3x8", "training mode"),
        ("models:net", "3x9", "shapes cannot be multiplied (3x9 and 8x8)"),
        ("models:tagger", "3x8", "mask"),
    ],
)
def test_a_failure_leaves_nothing_behind(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str, spec: str, message: str
) -> None:
    assert run(["freeze", target, "-o", "net.pt", "--input", spec]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert message in shown
    assert shown.count("\n") == 1
    assert not _left_behind(folder)


def test_an_existing_file_is_replaced_on_demand_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "net.pt").write_text("precious")
    args = ["freeze", "models.py:net", "-o", "net.pt", "--input", "3x8"]
    assert run(args) == 2
    assert "error: net.pt exists: pass --force to replace it" in capsys.readouterr().err
    assert (folder / "net.pt").read_text() == "precious"
    assert run([*args, "--force"]) == 0
    assert torch.jit.load("net.pt")(torch.randn(1, 8)).shape == (1, 2)
    assert _left_behind(folder) == {"net.pt"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_while_writing_keeps_the_old_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def half_written(self: object, path: str, **_: object) -> None:
        Path(path).write_bytes(b"PK")
        raise error

    (folder / "net.pt").write_text("precious")
    monkeypatch.setattr(amp_script.frozen.FrozenModule, "save", half_written)
    args = ["freeze", "models.py:net", "-o", "net.pt", "--input", "3x8", "--force"]
    assert run(args) == (130 if isinstance(error, KeyboardInterrupt) else 1)
    assert (folder / "net.pt").read_text() == "precious"
    assert _left_behind(folder) == {"net.pt"}


def test_a_difference_from_eager_autocast_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "odd.py").write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        return x + self.calls\n"
        "odd = Odd().eval()\n"
    )
    assert run(["freeze", "odd.py:odd", "-o", "odd.pt", "--input", "float32[0,1]:2"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: odd.py:odd: ")
    assert "differs from eager autocast in output: float32 2, up to " in shown
    assert " units in the last place apart; " in shown
    assert "keep such state in a buffer" in shown
    assert shown.count("\n") == 1
    assert _left_behind(folder) == {"odd.py"}


def test_inputs_in_other_sizes_are_known_to_vary(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "sizes.py").write_text("import torch\ndef longer(): return torch.randn(5, 8)\n")
    args = ["--check-inputs", "sizes.py:longer", "--output-dtype", "float32"]
    assert run(["freeze", "models.py:net", "-o", "net.pt", "--input", "3x8", *args]) == 0
    assert "float32 ?x8" in capsys.readouterr().out
    loaded = amp_script.load("net.pt")
    assert loaded(torch.randn(4, 8)).dtype is torch.float32
    for file_format, name in (("torchscript", "bad.pt"), ("export", "bad.pt2")):
        (folder / "sizes.py").write_text("import torch\ndef longer(): return torch.randn(5, 9)\n")
        sys.modules.pop("sizes")
        options = [*args, "--format", file_format]
        assert run(["freeze", "models.py:net", "-o", name, "--input", "3x8", *options]) == 1
        assert not (folder / name).exists()


@loads_exported_programs
def test_the_export_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "sizes.py").write_text("import torch\ndef longer(): return torch.randn(5, 8)\n")
    options = ["--format", "export", "--check-inputs", "sizes.py:longer"]
    args = ["freeze", "models.py:net", "--input", "3x8", *options]
    assert run([*args, "-o", "net.pt"]) == 2
    assert "net.pt: expected a name that ends in .pt2" in capsys.readouterr().err
    assert run([*args, "-o", "net.pt2"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["region"].strip() == "bfloat16 on cpu, in the program"
    assert rows["input input"].strip() == "float32 ?x8"
    assert rows["verified"].strip() == "equal to eager autocast to the bit"
    x = torch.randn(4, 8)
    expected = _eager("net", x)
    assert isinstance(expected, torch.Tensor)
    got = torch.export.load("net.pt2").module()(x)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)
    assert _left_behind(folder) == {"net.pt2", "sizes.py"}
    assert run(["freeze", "models.py:net", "-o", "x.pt", "--input", "3x8", "--format", "onnx"]) == 2
    assert "--format onnx: expected torchscript or export" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing_behind(folder: Path) -> None:
    # A shell starts background jobs with SIGINT ignored, and their children inherit that.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from amp_script.cli import main; main()"
    )
    command = [sys.executable, "-c", program]
    command += ["freeze", "models.py:slow", "-o", "net.pt", "--input", "1x8"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors == "error: interrupted\n"
    assert not _left_behind(folder)
