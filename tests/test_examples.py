"""The examples run to their last line and find what they say they find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import amp_script

EXAMPLES = Path(__file__).parents[1] / "examples"


def _run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cpu_inference() -> None:
    shown = _run(EXAMPLES / "cpu_inference.py")
    assert "of 32 answers equal to eager autocast to the bit" in shown


def test_scripted_blocks() -> None:
    shown = _run(EXAMPLES / "scripted_blocks.py")
    assert "scripted, saved and loaded equal eager mode to the bit" in shown


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_training_in_two_processes() -> None:
    shown = _run(EXAMPLES / "train_scripted.py", "--steps", 3, "--processes", 2)
    told = [line[:9] for line in shown.splitlines() if not line.startswith("[Gloo]")]
    assert sorted(told) == ["process 0", "process 1"]
    assert shown.count("equal eager autocast's to the bit") == 2


def test_a_model_for_triton(tmp_path: Path) -> None:
    shown = _run(EXAMPLES / "triton_server" / "write_model.py", tmp_path / "models")
    assert "scores__0: torch.float32, sizes (None, 10)" in shown
    assert "what the server runs is the frozen model to the bit" in shown
    assert (tmp_path / "models" / "classifier" / "config.pbtxt").is_file()


def test_leaving_torchscript(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    options = [] if compiler else ["--no-compiler"]
    example = EXAMPLES / "leaving_torchscript.py"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    if compiler and torch.__version__ < "2.10":
        # Its layer norm and gelu round in other places, which docs/limits.md says.
        with pytest.raises(AssertionError, match=r"AOTInductor +differs"):
            _run(example, **environment)
        options = ["--no-compiler"]
    shown = _run(example, *options, **environment)
    ways = [line.split()[0] for line in shown.splitlines() if "equal to eager" in line]
    assert ways == ["TorchScript", "torch.export", "AOTInductor"][: 2 if options else 3]


# --- batch inference ------------------------------------------------------------------------------

BATCH = 8


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For Ray's sockets, whose paths must not be as long as those of pytest's folders are."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder


def test_batch_inference(tmp_path: Path, short_folder: str) -> None:
    pytest.importorskip("ray", reason="the example needs the extra `examples`")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).eval()
    frozen = amp_script.trace_and_freeze(model, torch.randn(BATCH, 16))
    amp_script.save(frozen, tmp_path / "model.pt")
    (tmp_path / "in").mkdir()
    for index in range(5):
        rows = torch.randn(3 * BATCH + index, 16)
        np.save(tmp_path / "in" / f"{index}.npy", rows.numpy())

    program = EXAMPLES / "batch_inference" / "score_files.py"
    command = [program, tmp_path / "model.pt", tmp_path / "in", tmp_path / "out"]
    command += ["--actors", 2, "--batch-size", BATCH]
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": short_folder}
    shown = _run(*command, **environment)
    # On a busy machine Ray says of its own what it tries again.
    said = [line for line in shown.splitlines() if "(raylet)" not in line]
    assert said == ["5 files to score", "130 rows scored by 2 processes of 1 threads"]

    alone = amp_script.load(tmp_path / "model.pt")
    for file in (tmp_path / "in").iterdir():
        rows = torch.from_numpy(np.load(file))
        with torch.no_grad():
            expected = torch.cat([alone(batch).float() for batch in rows.split(BATCH)])
        scores = torch.from_numpy(np.load(tmp_path / "out" / file.name))
        assert torch.equal(scores, expected)
    assert len(list((tmp_path / "out").iterdir())) == 5

    # What is there is not scored again, and Ray is not even started.
    assert _run(*command, **environment) == "0 files to score\n"
