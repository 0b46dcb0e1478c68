"""``amp-script verify``: exit code and report, for a file that is its model and one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("typer", reason="the command needs the extra `cli`")

import amp_script
from amp_script.cli import app

MODELS = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A frozen file, and the file of the models that the first of them is from."""
    models = tmp_path / "models_to_verify.py"
    models.write_text(MODELS)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    frozen = amp_script.trace_and_freeze(
        net, torch.rand(3, 8), compute="native", output_dtype=torch.float32
    )
    amp_script.save(frozen, tmp_path / "net.pt")
    return str(tmp_path / "net.pt"), str(models)


def test_the_model_itself(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file, models = files
    options = ["--compute", "native", "--output-dtype", "float32", "--exact"]
    code = app.run(["verify", file, f"{models}:net", "--input", "5x8", *options])
    shown = capsys.readouterr().out
    assert code == 0
    assert shown.startswith("equal to eager autocast to the bit")
    assert "5x4" in shown


def test_another_model(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    file, models = files
    options = ["--compute", "native", "--output-dtype", "float32"]
    code = app.run(["verify", file, f"{models}:other", "--input", "5x8", *options])
    shown = capsys.readouterr()
    assert code == 1
    assert "differ" in shown.out
    assert f"{file}: differs from eager autocast in output" in shown.err.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "5x8", "--compute", "fast"], "expected auto or native or upcast"),
        (["--input", "5x8", "--output-dtype", "int8"], "expected bfloat16 or float16 or float32"),
        ([], "give example inputs"),
    ],
)
def test_wrong_command_lines(
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    file, models = files
    assert app.run(["verify", file, f"{models}:net", *options]) == 2
    assert message in capsys.readouterr().err
