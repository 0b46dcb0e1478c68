"""The wheel and the source archive: complete, with no more than the package, well described, and at
work in an environment that has nothing but what they ask for."""

import email
import os
import re
import subprocess
import sys
import tarfile
import textwrap
import venv
import zipfile
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import distribution
from pathlib import Path

import pytest
import tomlkit
from packaging.requirements import Requirement

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


class Environment:
    """A virtual environment with the wheel, and links to what some of its extras require.

    Links spare the copies: torch alone is of many hundred megabytes.
    """

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self.folder = folder
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")
        for name in _required_by(wheel, extras):
            self._link(name)
        pip = ["-m", "pip", f"--python={self.bin / 'python'}", "install", "--quiet"]
        alone = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
        subprocess.run([sys.executable, *pip, *alone, str(wheel)], check=True)

    def _link(self, name: str) -> None:
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            link = self.packages / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))).resolve())

    def run(self, program: str, *args: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, which sees no other packages."""
        outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.bin / program), *args],
            cwd=self.folder,
            env=outside,
            capture_output=True,
            text=True,
            check=False,
        )


def _required_by(wheel: Path, extras: tuple[str, ...]) -> set[str]:
    """Every distribution that a wheel with some of its extras needs, by name."""
    with zipfile.ZipFile(wheel) as archive:
        about = email.message_from_string(_dist_info(archive, "METADATA"))
    needed: set[str] = set()
    waiting = list(_applying(about.get_all("Requires-Dist", []), extras))
    while waiting:
        requirement = waiting.pop()
        if requirement.name not in needed:
            needed.add(requirement.name)
            lines = distribution(requirement.name).requires or []
            waiting += _applying(lines, tuple(requirement.extras))
    return needed


def _applying(lines: list[str], extras: tuple[str, ...]) -> Iterator[Requirement]:
    for line in lines:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


@pytest.fixture(scope="module")
def library(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the library alone."""
    assert wheel.filename is not None
    return Environment(tmp_path_factory.mktemp("library") / "venv", Path(wheel.filename))


@pytest.fixture(scope="module")
def command(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the library and the command."""
    assert wheel.filename is not None
    return Environment(tmp_path_factory.mktemp("command") / "venv", Path(wheel.filename), "cli")


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


def test_the_wheel_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "amp_script"
    files = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "amp_script/py.typed" in files
    assert files <= set(wheel.namelist())


def test_the_wheel_holds_nothing_but_the_package(wheel: zipfile.ZipFile) -> None:
    tops = {path.partition("/")[0] for path in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"amp_script"}
    assert not [path for path in wheel.namelist() if "__pycache__" in path]


def test_the_wheel_holds_the_licence_and_the_stubs(wheel: zipfile.ZipFile) -> None:
    assert _dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    stubs = ROOT / "stubs" / "torch-stubs"
    wanted = {path.relative_to(stubs.parent).as_posix() for path in stubs.rglob("*.pyi")}
    assert wanted
    assert {f"amp_script/_stubs/{path}" for path in wanted} <= set(wheel.namelist())


def test_the_wheel_of_the_folder_is_that_of_the_source_archive(
    wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    with zipfile.ZipFile(_build(ROOT, tmp_path, "wheel")) as direct:
        assert sorted(direct.namelist()) == sorted(wheel.namelist())
        differing = [name for name in wheel.namelist() if direct.read(name) != wheel.read(name)]
    assert not differing


FREEZES = """
    import sys
    from pathlib import Path

    import torch
    import amp_script

    assert Path(amp_script.__file__).is_relative_to(sys.prefix), amp_script.__file__
    assert (Path(amp_script.__file__).parent / "py.typed").exists()
    model, x = torch.nn.Linear(8, 2).eval(), torch.randn(4, 8)
    frozen = amp_script.trace_and_freeze(model, x, dtype=torch.bfloat16)
    amp_script.save(frozen, "model.pt")
    assert torch.equal(amp_script.load("model.pt")(x), frozen(x))
    assert torch.equal(amp_script.script(model)(x), model(x))
"""


def test_the_library_works_with_what_it_requires_alone(library: Environment) -> None:
    done = library.run("python", "-c", textwrap.dedent(FREEZES))
    assert done.returncode == 0, done.stderr


def test_the_command_says_what_it_lacks_without_its_extra(library: Environment) -> None:
    done = library.run("amp-script", "--version")
    assert done.returncode == 1
    assert "pip install 'amp-script[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_works_with_its_extra(command: Environment) -> None:
    done = command.run("amp-script", "--version")
    assert done.stdout.startswith(f"amp-script {_version()}, torch "), done.stderr
    (command.folder / "models.py").write_text("import torch\nnet = torch.nn.Linear(3, 2).eval()\n")
    args = ("freeze", "models.py:net", "-o", "net.pt", "--input", "2x3")
    done = command.run("amp-script", *args)
    assert done.returncode == 0, done.stderr
    assert (command.folder / "net.pt").exists()


def _version() -> str:
    return str(tomlkit.parse((ROOT / "pyproject.toml").read_text())["project"]["version"])


def test_the_version_stands_in_one_place() -> None:
    version = _version()
    assert re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}((a|b|rc)\d+)?", version)
    elsewhere = [
        path
        for path in (ROOT / "amp_script").rglob("*.py")
        if re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", path.read_text())
    ]
    assert not elsewhere
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", f"[{version}]", version)


def test_each_python_that_is_supported_is_named(about: Message) -> None:
    named = re.findall(r"Python :: (3\.\d+)$", "\n".join(about.get_all("Classifier", [])), re.M)
    assert min(named, key=lambda each: int(each[2:])) == about["Requires-Python"].lstrip(">=")
    sessions = (ROOT / "noxfile.py").read_text()
    assert re.findall(r'"(3\.\d+)"', sessions) == named


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
