"""The typed example: clean under both checkers with nothing silenced, and it runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkers import mypy, pyright

from amp_script import torch_stubs
from amp_script.stubgen import generate_stub

EXAMPLES = Path(__file__).parents[1] / "examples"
FILES = sorted((EXAMPLES / "typed_service").glob("*.py"))


@pytest.mark.parametrize("with_stubs", [False, True])
def test_mypy_finds_no_error_and_no_expression_of_type_any(
    with_stubs: bool, tmp_path: Path
) -> None:
    search_path = _stubs(tmp_path) if with_stubs else None
    reports = mypy(FILES, path=[EXAMPLES], search_path=search_path, options=["--disallow-any-expr"])
    # A decorator that takes any function has Any in its type, and is not of type Any.
    assert [r for r in reports if not r.message.startswith('Expression type contains "Any"')] == []


@pytest.mark.parametrize("with_stubs", [False, True])
def test_pyright_finds_no_error(with_stubs: bool, tmp_path: Path) -> None:
    search_path = _stubs(tmp_path) if with_stubs else None
    assert pyright(FILES, path=[EXAMPLES], search_path=search_path) == []


def _stubs(folder: Path) -> Path:
    return torch_stubs.write_search_path(folder / "stubs")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_is_silenced(file: Path) -> None:
    assert not re.search(r"\bcast\b|type: *ignore|pyright: *ignore|\bAny\b", file.read_text())


def test_it_runs_and_its_description_is_what_stubgen_writes(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path\n"
        "from typed_service import __main__ as service\n"
        "from typed_service.config import Config\n"
        "service.main()\n"
        "service.write(service.train(Config(), steps=1), Config(), Path('model.pt'))\n"
    )
    environment = {"PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error:::typed_service", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    answers = [line.split()[0] for line in done.stdout.splitlines()]
    assert answers == ["English", "French", "German"]

    model = torch.jit.load(tmp_path / "model.pt")
    written = generate_stub(model, "Classifier", importable=True).splitlines()
    described = (EXAMPLES / "typed_service" / "classifier.py").read_text().splitlines()
    signatures = [line for line in written if "def " in line]
    assert signatures == [line for line in described if "def " in line]
