"""The stubs for torch: true to the installed one, and without effect on the rest of it."""

import functools
import importlib
import keyword
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from checkers import Report, mypy, pyright

from amp_script import torch_stubs
from amp_script.cli import app
from amp_script.errors import StubsError

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
ALLOWLIST = ROOT / "stubs" / "stubtest_allowlist.txt"
ALLOWLIST_OF_OTHERS = ROOT / "stubs" / "stubtest_allowlist_other_torch.txt"
"""For another torch than the one that is pinned, and for newer Pythons."""

COVERED = ("torch.amp", "torch.cpu.amp", "torch.cuda.amp", "torch.jit")

CHANGED = {
    "torch.amp": {"autocast_decorator", "custom_bwd", "custom_fwd"},
    "torch.amp.autocast_mode": {"HAS_NUMPY", "autocast_decorator", "custom_bwd", "custom_fwd"},
    "torch.cuda.amp": {"amp_definitely_not_available", "custom_bwd", "custom_fwd"},
    "torch.jit": {
        *("Attribute", "RecursiveScriptModule", "ScriptFunction", "ScriptModule", "annotate"),
        *("export", "export_opnames", "fork", "freeze", "ignore", "isinstance", "load"),
        *("onednn_fusion_enabled", "optimize_for_inference", "save", "script"),
        *("enable_onednn_fusion", "interface"),  # newer torch types them itself
        *("script_if_tracing", "trace", "trace_module", "unused", "wait"),
    },
}
"""Public names whose type the stubs change, and which therefore have tests of their own."""

_C10D = "torch._C._distributed_c10d"

SEEN = (
    "torch",
    "torch.amp",
    "torch.amp.autocast_mode",
    "torch.autograd",
    "torch.backends",
    "torch.cpu",
    "torch.cpu.amp",
    "torch.cuda",
    "torch.cuda.amp",
    "torch.distributed",
    "torch.export",
    "torch.futures",
    "torch.fx",
    "torch.jit",
    "torch.linalg",
    "torch.nn",
    "torch.nn.functional",
    "torch.optim",
    "torch.utils.data",
)


@pytest.fixture(scope="module")
def search_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_stubs.write_search_path(tmp_path_factory.mktemp("torch") / "ours")


def test_stubtest_finds_the_stubs_true_to_the_installed_torch() -> None:
    command = [sys.executable, "-m", "mypy.stubtest", *COVERED]
    command += ["--allowlist", str(ALLOWLIST)]
    pinned = f"torch=={torch.__version__.partition('+')[0]}\n" in CONSTRAINTS.read_text()
    if not pinned or sys.version_info >= (3, 13):
        command += ["--allowlist", str(ALLOWLIST_OF_OTHERS), "--ignore-unused-allowlist"]
    environment = {"PYTHONPATH": str(ROOT / "stubs"), "PATH": ""}
    done = subprocess.run(
        command, env=environment, cwd=ROOT / "stubs", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("allowlist", [ALLOWLIST, ALLOWLIST_OF_OTHERS], ids=lambda path: path.name)
def test_every_exception_for_stubtest_has_its_reason(allowlist: Path) -> None:
    for group in allowlist.read_text().strip().split("\n\n"):
        first, *entries = group.splitlines()
        assert first.startswith("# ")
        assert entries


# --- nothing else of torch changes its type -------------------------------------------------------


def _public_names() -> Iterable[tuple[str, str]]:
    for module in SEEN:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            holds = name.isidentifier() and not keyword.iskeyword(name)
            if holds and not name.startswith("_") and not issubclass(type(value), ModuleType):
                yield module, name


SAME = (
    # mypy writes parameters that may be any in two ways.
    ("[*Any, **Any]", "..."),
    ("ScriptModule[..., Any]", "ScriptModule"),
    # In the circle of torch's imports mypy may leave this alias as it is, from torch 2.14 on.
    (f"{_C10D}.ReduceOp | {_C10D}.ReduceOp.RedOpType", "_ReduceOp?"),
)
"""Two ways in which checkers write a type."""


def _types(reports: Iterable[Report], lines: list[str]) -> dict[str, str]:
    """What a checker reveals for each line that it finds no fault with."""
    reports = list(reports)
    faulty = {report.line for report in reports if report.code}
    return {
        lines[report.line - 1]: functools.reduce(
            lambda message, ways: message.replace(*ways), SAME, report.message
        )
        for report in reports
        if report.line not in faulty
    }


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_only_what_is_covered_changes_its_type(
    checker: Callable[..., list[Report]], search_path: Path, tmp_path: Path
) -> None:
    names = list(_public_names())
    lines = [f"import {module}" for module in SEEN]
    lines += [f"reveal_type({module}.{name})" for module, name in names]
    file = tmp_path / "names.py"
    file.write_text("\n".join(lines))
    without = _types(checker([file]), lines)
    with_stubs = _types(checker([file], search_path=search_path), lines)
    changed = {line for line in without if without[line] != with_stubs.get(line)}
    covered = {f"reveal_type({module}.{name})" for module in CHANGED for name in CHANGED[module]}
    assert {line: (without[line], with_stubs.get(line)) for line in changed - covered} == {}
    assert len(without) > 1500


# --- the directory that checkers are pointed at ---------------------------------------------------

PROGRAM = """
import torch
from torch import Tensor, nn
from typing_extensions import assert_type

class Net(nn.Module):
    @torch.autocast("cpu")
    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        return x * scale, 1

scripted = torch.jit.freeze(torch.jit.script(Net().eval()))
assert_type(scripted(torch.ones(1), 2.0), tuple[Tensor, int])
assert_type(nn.functional.relu(torch.ones(1, dtype=torch.bfloat16)), Tensor)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_a_generic_module_breaks_nothing(
    checker: Callable[..., list[Report]], search_path: Path, tmp_path: Path
) -> None:
    """As a newer torch may have it: ``nn.Module`` generic in its parameters and its result."""
    changed = tmp_path / "generic"
    for file in search_path.rglob("*.py*"):
        copy = changed / file.relative_to(search_path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    for package in ("nn", "nn/modules"):
        origin = Path(torch.__file__).parent / package / "__init__.py"
        copy = changed / "torch" / package / "__init__.py"
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(torch_stubs.copy_of(origin, Path(package)))
    source = Path(torch.nn.modules.module.__file__).read_text()
    generic = "# mypy: ignore-errors\n" + source.replace(
        "\nclass Module:\n",
        "\nfrom typing import Generic\n"
        "from typing_extensions import ParamSpec\n"
        "P = ParamSpec('P')\n"
        "R = TypeVar('R', covariant=True)\n"
        "class Module(Generic[P, R]):\n",
    ).replace("__call__: Callable[..., Any]", "__call__: Callable[P, R]")
    assert generic.count("Generic[P, R]") == generic.count("Callable[P, R]") == 1
    (changed / "torch/nn/modules/module.py").write_text(generic)
    file = tmp_path / "program.py"
    file.write_text(
        PROGRAM.replace("nn.Module)", "nn.Module[[Tensor, float], tuple[Tensor, int]])")
        + "from amp_script.typing import HasForward, TypedScriptModule\n"
        + "def ours(net: TypedScriptModule[[Tensor], Tensor], x: Tensor) -> None:\n"
        + "    assert_type(net(x), Tensor)\n"
        + "    assert_type(torch.jit.freeze(net)(x), Tensor)\n"
        + "    forward: HasForward[[Tensor], Tensor] = net\n"
    )
    assert checker([file], search_path=changed) == []


def test_the_directory_is_made_once_and_anew_for_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torch_stubs.search_path(tmp_path)
    mark = first / torch_stubs.MARK
    made = mark.stat().st_mtime_ns
    assert torch_stubs.search_path(tmp_path) == first
    assert mark.stat().st_mtime_ns == made
    assert torch.__version__ in first.name

    installed = tmp_path / "site-packages" / "torch"
    for package in ("", "cpu", "cuda"):
        (installed / package).mkdir(parents=True)
        (installed / package / "__init__.py").write_text("from . import new as new\n")
        (installed / package / "new.py").touch()
    other = SimpleNamespace(__file__=str(installed / "__init__.py"), __version__="9.9")
    monkeypatch.setattr(torch_stubs, "torch", other)
    second = torch_stubs.search_path(tmp_path)
    assert second != first
    text = (second / "torch/cuda/__init__.py").read_text()
    assert "from torch.cuda import new as new\n" in text
    assert "import torch.cuda.new as new\n" in text


def test_stubs_of_somebody_else_stay_in_force(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another distribution may install ``torch-stubs`` with an ``__init__`` of its own."""
    theirs = tmp_path / "theirs" / "torch-stubs"
    theirs.mkdir(parents=True)
    (theirs / "__init__.pyi").write_text("from torch.jit import script as script\nspecial: int\n")
    (theirs / "py.typed").write_text("partial\n")
    monkeypatch.setattr(sys, "path", [str(theirs.parent), *sys.path])
    target = torch_stubs.write_search_path(tmp_path / "ours")
    assert "special: int" in (target / "torch/__init__.pyi").read_text()
    assert not (target / "torch/__init__.py").exists()


def test_a_directory_of_ones_own_is_made_again_but_no_other_is_touched(tmp_path: Path) -> None:
    target = torch_stubs.write_search_path(tmp_path / "stubs")
    stale = target / "torch" / "gone.pyi"
    stale.touch()
    torch_stubs.write_search_path(target)
    assert not stale.exists()
    with pytest.raises(StubsError, match="not made by amp-script"):
        torch_stubs.write_search_path(tmp_path)


def test_the_command_prints_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert app.run(["stubs"]) == 0
    printed = Path(capsys.readouterr().out.strip())
    assert printed.is_relative_to(tmp_path)
    assert (printed / "torch/jit/_script.pyi").is_file()

    assert app.run(["stubs", "--output", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "mine")
    assert (tmp_path / "mine/torch/amp/autocast_mode.pyi").is_file()

    assert app.run(["stubs", "--partial"]) == 0
    assert Path(capsys.readouterr().out.strip(), "torch-stubs/py.typed").is_file()


# --- the partial stub package ---------------------------------------------------------------------


def test_mypy_takes_the_partial_package_from_the_interpreters_path(program: Path) -> None:
    assert mypy([program], path=[torch_stubs.partial_package().parent]) == []


def test_the_package_is_partial_and_replaces_no_package_above_its_own() -> None:
    package = torch_stubs.partial_package()
    assert (package / "py.typed").read_text() == "partial\n"
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.pyi")}
    assert not files & {"__init__.pyi", "cpu/__init__.pyi", "cuda/__init__.pyi", "nn/__init__.pyi"}


def test_the_distribution_of_its_own_holds_the_stubs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "stubs", check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    names = set(zipfile.ZipFile(wheel).namelist())
    package = torch_stubs.partial_package()
    files = {path.relative_to(package.parent).as_posix() for path in package.rglob("*.pyi")}
    assert files | {"torch-stubs/py.typed"} <= names


def test_the_wheel_carries_the_stubs_as_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.iterdir()
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assert not (installed / "torch-stubs").exists()
    here = torch_stubs.partial_package()
    monkeypatch.setattr(torch_stubs, "__file__", str(installed / "amp_script" / "torch_stubs.py"))
    there = torch_stubs.partial_package()
    assert there.is_relative_to(installed)
    assert {path.relative_to(here): path.read_text() for path in here.rglob("*.*")} == {
        path.relative_to(there): path.read_text() for path in there.rglob("*.*")
    }
