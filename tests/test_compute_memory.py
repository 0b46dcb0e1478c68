"""Memory: a plan holds the weights once, and converts them one at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from torch import nn

from amp_script import save, trace_and_freeze

WIDTH, SMALL, LAYERS, ROWS = 1536, 260, 12, 64
WEIGHTS = LAYERS * WIDTH * WIDTH
Files: TypeAlias = "dict[tuple[str, int], Path]"

MEASURE = f"""
import re, sys, torch
import amp_script

def status(key):
    with open("/proc/self/status") as file:
        return int(re.search(key + r":\\s+(\\d+)", file.read()).group(1)) * 1024

def run(path, width):
    module = torch.jit.load(path) if compute == "torch" else amp_script.load(path, compute=compute)
    with torch.no_grad():
        for _ in range(3):
            module(torch.rand({ROWS}, width))

*paths, compute = sys.argv[1:]
# The code that a first program brings into memory is not the second one's.
run(paths[0], {SMALL})
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
run(paths[1], {WIDTH})
print(status("VmHWM") - before)
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads peaks of memory from Linux's /proc"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    torch.manual_seed(0)
    paths = {}
    for width in (SMALL, WIDTH):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).eval()
        frozen = trace_and_freeze(model, (torch.rand(ROWS, width),), compute="native", verify=False)
        for compute, name in ((None, "reduced"), ("upcast", "float32")):
            paths[name, width] = tmp_path_factory.mktemp("memory") / f"{name}.pt"
            save(frozen, paths[name, width], compute=compute)
    return paths


def peak(files: Files, name: str, compute: str) -> int:
    """Bytes by which loading and three calls raise the peak of a process's memory."""
    paths = [str(files[name, width]) for width in (SMALL, WIDTH)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, *paths, compute],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(done.stdout)


def test_native_holds_no_float32_copy(files: Files) -> None:
    assert peak(files, "reduced", "native") <= 1.1 * peak(files, "reduced", "torch")


@pytest.mark.parametrize("compute", ["upcast", "packed"])
def test_float32_plans_hold_no_reduced_copy(files: Files, compute: str) -> None:
    # Torch's own peak on the float32 file is what float32 weights and activations need.
    needed = peak(files, "float32", "torch")
    assert needed > 4 * WEIGHTS
    assert peak(files, "reduced", compute) <= 1.1 * needed
