"""The command's frame: help, exit codes, errors in one line, and what a missing extra says."""

import importlib
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from amp_script import cli
from amp_script.cli import app, output
from amp_script.errors import AmpScriptError, UsageError
from amp_script.tables import Table


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """A command ``fail`` that raises what the test puts in the list."""
    errors: list[BaseException] = []

    def command() -> None:
        """Fail."""
        raise errors.pop()

    module = SimpleNamespace(command=command)
    monkeypatch.setattr(app, "COMMANDS", (*cli.COMMANDS, "fail"))
    monkeypatch.setattr(importlib, "import_module", _with("amp_script.cli.fail", module))
    yield errors
    assert not errors


def _with(name: str, module: object) -> object:
    real = importlib.import_module
    # Others import with it meanwhile, such as pydantic, which names the package too.
    return lambda wanted, *package, **named: (
        module if wanted == name else real(wanted, *package, **named)
    )


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_help_lists_every_command(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(args) == 0
    shown = capsys.readouterr()
    for name in cli.COMMANDS:
        assert re.search(rf"\b{name} ", shown.out)
    assert not shown.err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run([name, "--help"]) == 0
    assert f"amp-script {name}" in capsys.readouterr().out
    module = importlib.import_module(f"amp_script.cli.{name.replace('-', '_')}")
    assert module.command.__doc__


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert re.fullmatch(r"amp-script \S+, torch \S+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("no such thing"), 2, "error: no such thing\n"),
        (
            AmpScriptError("it failed:\n  here\n\n  and here"),
            1,
            "error: it failed: here; and here\n",
        ),
        (
            ValueError("odd [value]"),
            1,
            f"error: ValueError: odd [value] (at {__file__}:",
        ),
        (OSError(28, "No space left"), 1, "error: OSError: [Errno 28] No space left (at "),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    failing.append(error)
    assert app.run(["fail"]) == code
    shown = capsys.readouterr()
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
    assert not shown.out


@pytest.mark.parametrize("args", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    failing.append(ValueError("it failed"))
    assert app.run(args) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback (most recent call last)")
    assert shown.endswith("\nerror: ValueError: it failed\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["frieze"], "No such command 'frieze'"),
        (["freeze", "--colour", "red"], "No such option: --colour"),
        (["freeze"], "Missing argument 'TARGET'"),
        (["freeze", "a:b"], "Missing option '--output' / '-o'"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    assert app.run(args) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}")
    assert shown.count("\n") == 1


def test_a_warning_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = SimpleNamespace(command=lambda: warnings.warn("beware\n  of this", stacklevel=1))
    monkeypatch.setattr(app, "COMMANDS", ("freeze", "warn"))
    monkeypatch.setattr(importlib, "import_module", _with("amp_script.cli.warn", module))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = warnings.showwarning
        assert app.run(["warn"]) == 0
        assert warnings.showwarning is show
    assert capsys.readouterr().err == "warning: beware; of this\n"


def test_progress_is_for_terminals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with output.step("working"):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    with output.step("working"):
        pass
    shown = capsys.readouterr()
    assert "working" in shown.err
    assert not shown.out


@pytest.mark.parametrize("columns", [10, 39, 40, 56, 57])
def test_a_terminal_of_any_width_gets_every_name_and_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [("encoder.layers.0.attention", "0.00378", "0.151 to 0.168"), ("中文", "12", "1 to 2")]
    output.grid(Table("", ("submodule", "largest error", "middle half"), rows, numbers=2))
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    heading, _, *below = (re.split(" {2,}", line.rstrip()) for line in lines)
    assert heading == ["submodule", "largest error", "middle half"]
    names = "".join(cells[0] for cells in below)
    assert names == "".join(name for name, _, _ in rows)
    assert [tuple(cells[1:]) for cells in below if len(cells) > 1] == [row[1:] for row in rows]
    assert (max(map(len, lines)) <= columns) is (columns >= 40)
    assert (len(below) > len(rows)) is (columns in (40, 56))


def test_what_a_terminal_would_act_on_is_shown_with_escapes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "a\x1b[31m\nb"
    output.grid(Table("", ("submodule", "class"), [(name, "Linear")]))
    output.table([(name, name)])
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count(r"a\x1b[31m\nb") == shown.count("\n") == 3
    assert str(Table("", ("name",), [(name,)])).splitlines() == ["name", r"a\x1b[31m\nb"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (45_500_000, "43.39 MiB")],
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert output.size(count) == text


def test_the_package_can_be_run_as_the_command() -> None:
    command = [sys.executable, "-m", "amp_script"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"amp-script {version('amp-script')}, torch {version('torch')}\n"
    assert subprocess.run([*command, "nothing"], capture_output=True).returncode == 2


@pytest.mark.parametrize(
    "start",
    [
        "from amp_script.cli import main; main()",
        "import runpy; runpy.run_module('amp_script', run_name='__main__')",
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(start: str) -> None:
    program = f"import sys; sys.modules['typer'] = None; {start}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "amp-script: the command needs typer, which is not installed: "
        "pip install 'amp-script[cli]'\n"
    )


def test_where_a_model_fails_is_shown_and_not_where_torch_or_the_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "fails_inside.py"
    model.write_text(
        "import torch\n\n\n"
        "class Net(torch.nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)\n\n\n"
        "linear = torch.nn.Linear(4, 4).eval()\n"
        "net = Net(linear).eval()\n"
    )
    arguments = ["--input", "2x3", "-o", str(tmp_path / "net.pt")]
    assert app.run(["freeze", f"{model}:net", *arguments]) == 1
    assert capsys.readouterr().err.endswith(f" (at {model}:6; --debug shows more)\n")
    assert app.run(["freeze", f"{model}:linear", *arguments]) == 1
    assert capsys.readouterr().err.endswith(" (--debug shows where)\n")
