"""The wheel and the source archive: complete, with no more than the package, and well described."""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _build(source: Path, target: Path, kind: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from the source archive, so that it proves that one complete."""
    folder = tmp_path_factory.mktemp("source")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return zipfile.ZipFile(_build(source, tmp_path_factory.mktemp("wheel"), "wheel"))


@pytest.fixture(scope="module")
def about(wheel: zipfile.ZipFile) -> Message:
    return email.message_from_string(_dist_info(wheel, "METADATA"))


def _dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def _required(about: Message) -> dict[str, str]:
    """What is required, by name, and the rest of its line."""
    lines = about.get_all("Requires-Dist", [])
    return {name: line for line in lines for name in re.findall(r"^[\w-]+", line)}


def test_the_wheel_holds_every_module_and_the_type_marker(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "amp_script"
    files = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    assert files | {"amp_script/py.typed"} <= set(wheel.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {path.partition("/")[0] for path in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"amp_script"}
    assert not [path for path in wheel.namelist() if "__pycache__" in path]


def test_the_source_archive_holds_tests_examples_and_constraints(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {
        "LICENSE",
        "README.md",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "examples/demo/encoder.py",
        "tests/test_packaging.py",
    }
    assert needed <= names


def test_the_library_depends_on_torch_and_typing_extensions_alone(about: Message) -> None:
    core = {name for name, line in _required(about).items() if "extra ==" not in line}
    assert core == {"torch", "typing-extensions"}
    assert about["Requires-Python"] == ">=3.10"
    assert about["License-Expression"] == "BSD-3-Clause"
    assert set(about.get_all("Provides-Extra", [])) == {"cli", "dev", "docs", "examples", "plot"}


def test_the_wheel_brings_the_command(wheel: zipfile.ZipFile) -> None:
    assert "amp-script = amp_script.cli:main" in _dist_info(wheel, "entry_points.txt")


def test_every_requirement_is_pinned_for_development(about: Message) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line}
    assert _required(about).keys() <= pinned
    assert "torch==2.13.0" in lines
