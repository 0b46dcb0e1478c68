"""What contributors meet: sessions for other versions, hooks for commits, templates for issues."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def _run(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *args], cwd=cwd, capture_output=True, text=True, check=False
    )


def test_there_is_a_session_for_each_torch_and_python() -> None:
    done = _run("nox", "--list", "--no-color")
    assert done.returncode == 0, done.stderr
    for python in ("3.10", "3.11", "3.12", "3.13"):
        for torch in ("2.6", "2.9", "2.13", "2.14", "2.15"):
            assert f"tests-{python}(torch='{torch}')" in done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the project's hooks, and its environment."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    (tmp_path / ".pre-commit-config.yaml").write_text(config)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".gitignore").write_text(".venv\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "hook"),
    [
        ("bad.py", "import  os\nx = undefined\n", "ruff"),
        ("bad.py", "x = [1,\n  2]\n", "ruff-format"),
        ("bad.md", "a line \n", "spaces"),
        ("bad.md", "<<<<<<< HEAD\n", "conflicts"),
        ("bad.py", "def f() -> int:\n\treturn 1\n", "tabs"),
        ("model.pt", "weights", "programs"),
    ],
)
def test_each_hook_finds_what_it_is_for(name: str, text: str, hook: str, repository: Path) -> None:
    (repository / "good.py").write_text('"""Nothing to find."""\n')
    (repository / name).write_text(text)
    for file, passes in (("good.py", True), (name, False)):
        subprocess.run(["git", "add", file], cwd=repository, check=True)
        done = _run("pre_commit", "run", hook, "--files", file, cwd=repository)
        assert (done.returncode == 0) is passes, done.stdout + done.stderr


def test_the_hooks_need_no_network() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} <= {"system", "pygrep", "fail"}
    assert _run("pre_commit", "validate-config").returncode == 0


def _templates() -> list[Path]:
    return sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_issues_ask_for_what_is_needed_to_act() -> None:
    templates = [path for path in _templates() if path.name != "config.yml"]
    assert len(templates) == len(_templates()) - 1 > 0
    for path in templates:
        form: dict[str, Any] = yaml.safe_load(path.read_text())
        assert form["name"], path
        assert form["description"], path
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields), path
        assert any(field.get("validations", {}).get("required") for field in fields), path


class _Session:
    """A session of nox that only says what it would do, and that torch brought sympy along."""

    def __init__(self, folder: Path) -> None:
        self.posargs: list[str] = []
        self.installed: list[tuple[str, ...]] = []
        self.ran: list[tuple[str, ...]] = []
        self._folder = folder

    def create_tmp(self) -> str:
        return str(self._folder)

    def install(self, *args: str) -> None:
        self.installed.append(args)

    def run(self, *args: str, env: dict[str, str]) -> None:
        self.ran.append(args)

    def run_install(self, *args: str, silent: bool) -> str:
        return "torch==2.6.0\nsympy==1.13.1\ntyping_extensions==4.9.0\n"


def test_a_session_keeps_what_came_with_its_torch_and_pins_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    sessions = runpy.run_path(str(ROOT / "noxfile.py"))
    session = _Session(tmp_path)
    sessions["tests"].func(session, "2.6")
    assert session.ran[-1][0] == "pytest"
    torch_alone, rest = session.installed
    assert torch_alone == ("torch==2.6.*",)
    pins = set(Path(rest[rest.index("--constraint") + 1]).read_text().splitlines())
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    everything = {line for line in lines if not line.startswith("#")}
    assert pins - everything == {"torch==2.6.0", "sympy==1.13.1", "typing_extensions==4.9.0"}
    given_way = {line.partition("==")[0] for line in everything - pins}
    assert given_way == {"torch", "sympy", "typing-extensions"}
