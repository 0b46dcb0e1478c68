"""What freezing and loading leave in memory, after many times: nothing.

CI looks at a short row of cycles. The long one, by hand:

    AMP_SCRIPT_STRESS_CYCLES=1000 pytest tests/test_stress_memory.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CYCLES = int(os.environ.get("AMP_SCRIPT_STRESS_CYCLES", "60"))

PROGRAM = """
import ctypes, gc, os, sys, warnings
import torch
from torch import nn
import amp_script

warnings.simplefilter("ignore", DeprecationWarning)
warnings.simplefilter("ignore", FutureWarning)
torch.set_num_threads(1)
what, file, cycles = sys.argv[1], sys.argv[2], int(sys.argv[3])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        first = nn.Linear(256, 256)
        self.first = torch.jit.script(first) if what == "freeze with a scripted part" else first
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))

    def forward(self, x):
        return self.layers(self.first(x)).softmax(-1)


model, x = Model().eval(), torch.rand(2, 256)


def freeze():
    frozen = amp_script.trace_and_freeze(model, x)
    amp_script.save(frozen, file)
    amp_script.load(file)(x)


def load():
    amp_script.load(file)(x)


def lower():
    amp_script.lower(file)(x)


def resident():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


freeze()
if what == "lower":
    torch.jit.save(torch.jit.script(model), file)
cycle = {"load": load, "lower": lower}.get(what, freeze)
for _ in range(10):
    cycle()
before = resident()
for _ in range(cycles):
    cycle()
print((resident() - before) / cycles)
"""

WEIGHTS = 3 * 256 * 256 * 2
"""Bytes of the model's weights in lower precision, of which a cycle has several copies."""

MOST = {
    "freeze": WEIGHTS / 50,
    # torch's freezing copies the types of scripted parts, which TorchScript never forgets.
    "freeze with a scripted part": WEIGHTS / 20,
    "load": WEIGHTS / 50,
    "lower": WEIGHTS / 50,
}
"""Bytes that a cycle may leave."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("what", MOST)
def test_cycles_leave_no_memory(what: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)  # a file, because TorchScript reads the source of what it compiles
    command = [sys.executable, str(program), what, str(tmp_path / "model.pt"), str(CYCLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < MOST[what], f"{float(done.stdout):.0f} bytes a cycle stay"
