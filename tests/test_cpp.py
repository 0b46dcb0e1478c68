"""The C++ example: what libtorch computes from a file is what Python computes, to the bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from amp_script import save, trace_and_freeze

SOURCE = Path(__file__).parent.parent / "examples" / "cpp"

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None,
    reason="needs cmake and a C++ compiler",
)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built against the libtorch of the installed torch."""
    build = tmp_path_factory.mktemp("cpp")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (
        ["cmake", "-S", str(SOURCE), "-B", str(build), prefix],
        ["cmake", "--build", str(build)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if "PyTorch: CUDA cannot be found" in done.stdout + done.stderr:
            pytest.skip("CMake files of a torch that is built for CUDA ask for CUDA's own headers")
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "run_program"


class Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional.relu(self.norm(self.first(x)))
        return self.up(y), y.mean((2, 3))


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def forward(self, ids: torch.Tensor, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layer(self.embedding(ids) + shift)
        return {"hidden": hidden, "pooled": hidden.mean(1)}


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(8, 16, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[0]


CASES: dict[str, tuple[type[nn.Module], tuple[torch.Tensor, ...]]] = {
    "image": (Image, (torch.linspace(-1, 1, 3 * 100).reshape(1, 3, 10, 10),)),
    "text": (Text, (torch.arange(24).reshape(2, 12), torch.linspace(0, 1, 32))),
    "tagger": (Tagger, (torch.linspace(-1, 1, 80).reshape(2, 5, 8),)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compute", ["native", "upcast"])
@pytest.mark.parametrize("name", CASES)
def test_cpp_gives_the_bits_of_python(
    name: str, compute: Any, dtype: torch.dtype, program: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, inputs = CASES[name]
    frozen = trace_and_freeze(model().eval(), inputs, dtype=dtype, compute="native", verify=False)
    model_file, inputs_file, outputs_file = (
        tmp_path / file for file in ("model.pt", "inputs.pt", "outputs.pt")
    )
    save(frozen, model_file, compute=compute)
    torch.save(inputs, inputs_file)
    done = subprocess.run(
        [program, model_file, inputs_file, outputs_file],
        env={"OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f'"compute": "{compute}"' in done.stdout
    expected = frozen if compute == "native" else frozen.baked("upcast")
    # A program may ask whether gradients are recorded, as nn.TransformerEncoderLayer does; the
    # example records none.
    with torch.inference_mode():
        result = expected(*inputs)
    # TorchScript tags dictionaries with their type by a function that torch.load must be allowed.
    assert_same(torch.load(outputs_file, weights_only=False), result)


def assert_same(given: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert given.dtype == expected.dtype
        assert torch.equal(given, expected)
    elif isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for key in expected:
            assert_same(given[key], expected[key])
    else:
        for one, other in zip(given, expected, strict=True):
            assert_same(one, other)


def test_errors_come_without_a_backtrace(program: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [program, tmp_path / "missing.pt", tmp_path / "x.pt", tmp_path / "y.pt"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "frame #" not in done.stderr
    usage = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert usage.returncode == 2
    assert usage.stderr.startswith("usage: ")
