"""Runs mypy and pyright on files, and gives what they report as data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]

_EXPECTED = re.compile(r"# E: (?P<all>.*)$")


class Report(NamedTuple):
    """What a checker said about a line; ``code`` is empty for a note."""

    file: str
    line: int
    code: str
    message: str


Checker = Callable[..., list[Report]]


def mypy(
    files: Iterable[Path],
    *,
    search_path: Path | None = None,
    path: Sequence[Path] = (),
    options: Sequence[str] = (),
) -> list[Report]:
    """Reports of ``mypy --strict``, notes of ``reveal_type`` included.

    Args:
        files: what to check.
        search_path: for ``mypy_path``.
        path: directories before the interpreter's own packages.
        options: more of mypy's own.
    """
    cache = (
        ROOT
        / ".mypy_cache"
        / "tests"
        / torch.__version__
        / "-".join("plain" if each is None else each.name for each in (search_path, *path))
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--warn-unreachable", "--output=json"]
    command += ["--config-file=", f"--cache-dir={cache}", *options, *map(str, files)]
    lines = _run(command, MYPYPATH=search_path, PYTHONPATH=os.pathsep.join(map(str, path)))
    found = [json.loads(line) for line in lines.splitlines() if line]
    return [
        Report(
            Path(each["file"]).name,
            each["line"],
            each["code"] if each["severity"] == "error" else "",
            each["message"],
        )
        for each in found
    ]


def pyright(
    files: Iterable[Path], *, search_path: Path | None = None, path: Sequence[Path] = ()
) -> list[Report]:
    """Reports of pyright in its standard mode, types of ``reveal_type`` included.

    Args:
        files: what to check.
        search_path: for ``stubPath``.
        path: directories before the interpreter's own packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"extraPaths": list(map(str, path))}
        if search_path is not None:
            settings["stubPath"] = str(search_path)
        Path(folder, "pyrightconfig.json").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
        command += map(str, files)
        found = json.loads(_run(command, folder, PYRIGHT_PYTHON_IGNORE_WARNINGS="1"))
    return [
        Report(
            Path(each["file"]).name,
            each["range"]["start"]["line"] + 1,
            each.get("rule", "syntax") if each["severity"] != "information" else "",
            each["message"],
        )
        for each in found["generalDiagnostics"]
        if not _is_about_apply_in_older_torch(each["message"])
    ]


def _is_about_apply_in_older_torch(message: str) -> bool:
    """Whether pyright guesses the result of ``Function.apply``, which torch does not type.

    It reads the body, and up to torch 2.9 finds a None there.
    """
    return torch.__version__ < "2.10" and '"(...) -> (Unknown | Any | None)"' in message


def unexpected(checker: Checker, files: Sequence[Path], **options: object) -> list[str]:
    """Errors that a checker reports and the files do not announce, or the other way round.

    A line announces its errors by ``# E: mypy[code] pyright[code]``, with commas between codes.
    """
    reported = {
        (each.file, each.line, each.code): each.message
        for each in checker(files, **options)
        if each.code
    }
    announced = {
        (file.name, number, code)
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for code in _announced(checker.__name__, line)
    }
    return [
        f"{file}:{line}: unexpected {code}: {message}"
        for (file, line, code), message in sorted(reported.items())
        if (file, line, code) not in announced
    ] + [f"{file}:{line}: no {code}" for file, line, code in sorted(announced - reported.keys())]


def _announced(name: str, line: str) -> list[str]:
    match = _EXPECTED.search(line)
    codes = re.search(rf"\b{name}\[([^]]*)\]", match["all"]) if match else None
    return re.split(r",\s*", codes[1]) if codes else []


def _run(command: Sequence[str], folder: str | None = None, **environment: object) -> str:
    added = {name: str(value) for name, value in environment.items() if value}
    cleared = {key: value for key, value in os.environ.items() if key not in environment}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        # In a checkout's own folder its modules would be checked with the files.
        cwd=folder or tempfile.gettempdir(),
        env={**cleared, **added},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert not done.stderr, done.stderr
    return done.stdout
