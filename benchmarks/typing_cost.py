"""Counts what a type checker loses around TorchScript: errors, and expressions of type Any.

The same small service is checked on plain torch (``benchmarks/typed_service_plain``), on plain
torch with our stubs for it, and on amp-script (``examples/typed_service``).

    python benchmarks/typing_cost.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from amp_script import torch_stubs

ROOT = Path(__file__).parents[1]
PLAIN = ROOT / "benchmarks" / "typed_service_plain"
TYPED = ROOT / "examples" / "typed_service"


class Count(NamedTuple):
    """What a checker found in a package."""

    mypy_errors: int
    pyright_errors: int
    any_expressions: int


def count(package: Path, search_path: Path | None, folder: Path) -> Count:
    """Check a package, with stubs for torch from ``search_path`` if there is one."""
    files = [str(file) for file in sorted(package.glob("*.py"))]
    settings = {"extraPaths": [str(package.parent), str(TYPED.parent)]}
    if search_path is not None:
        settings["stubPath"] = str(search_path)
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    folders = [package.parent, TYPED.parent, *([search_path] if search_path else [])]
    environment = {"MYPYPATH": os.pathsep.join(str(each) for each in dict.fromkeys(folders))}
    command = [sys.executable, "-m", "mypy", "--strict", "--disallow-any-expr", "--config-file="]
    command += ["--output=json", f"--cache-dir={folder / 'cache'}", *files]
    lines = _run(command, folder, environment).splitlines()
    found = [json.loads(line) for line in lines if line]
    errors = [each["message"] for each in found if each["severity"] == "error"]
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    report = json.loads(_run([*command, *files], folder, {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}))
    return Count(
        sum(not message.startswith("Expression ") for message in errors),
        report["summary"]["errorCount"],
        errors.count('Expression has type "Any"'),
    )


def main() -> None:
    """Print the counts side by side."""
    with tempfile.TemporaryDirectory() as name:
        stubs = torch_stubs.write_search_path(Path(name, "stubs"))
        counts = {}
        for title, package, search_path in (
            ("plain torch", PLAIN, None),
            ("plain torch, our stubs", PLAIN, stubs),
            ("amp-script", TYPED, None),
        ):
            folder = Path(name, title)
            folder.mkdir()
            counts[title] = count(package, search_path, folder)
    print("| | " + " | ".join(counts) + " |")
    print("|---" * (1 + len(counts)) + "|")
    for field, title in (
        ("mypy_errors", "errors, `mypy --strict`"),
        ("pyright_errors", "errors, pyright"),
        ("any_expressions", "expressions of type `Any`"),
    ):
        print(f"| {title} | " + " | ".join(str(getattr(c, field)) for c in counts.values()) + " |")


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
