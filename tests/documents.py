"""The project's documents as their code blocks, and what it takes to run a page of them.

A page runs from top to bottom in an empty folder of its own:

- ``python`` blocks share their names, as in a notebook. One with ``title="models.py"`` is a file of
  that name instead, for the blocks below to import.
- ``sh`` blocks run line by line. ``amp-script`` runs in this process, other commands in bash, with
  the environment's own programs first. ``make`` runs this test among others, so that of its targets
  only the existence is asked.
- A ``text`` block with ``title="Output"`` is what the block above it printed; ``...`` stands for
  anything. Of one with ``title="Output, for example"`` the first word of each line is.
- Blocks of other languages are files of this repository, put in by name, or are parsed.

A block that cannot run has a comment before it, ``<!-- not run: REASON -->``; the tests list them.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tomlkit

from amp_script.cli.app import run as run_amp_script

__all__ = ["PAGES", "ROOT", "Block", "Page", "blocks_of"]

ROOT: Final = Path(__file__).parents[1]

PAGES: Final = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "stubs" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)

_FENCE: Final = re.compile(r"^(?P<indent> *)```(?P<language>\w+)(?P<attributes>.*)$")
_NOT_RUN: Final = re.compile(r"^ *<!-- not run: (?P<reason>.+) -->$")
_INCLUDED: Final = re.compile(r'^--8<-- "(?P<path>[^":]+)(?::[^"]*)?"$')
_SHELL: Final = re.compile(r"[|&;<>()$`*?]")


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        page: the file that it is in.
        line: the number of its first line of code.
        language: what stands behind the fence.
        title: the file name or caption that it has, or ``""``.
        code: its text, without the indentation of the fence.
        reason: why it does not run, or ``""``.
    """

    page: Path
    line: int
    language: str
    title: str
    code: str
    reason: str

    @property
    def place(self) -> str:
        """Where it is, as ``docs/page.md:12``."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Every code block of a page, in order.

    Raises:
        AssertionError: a block names no language, or does not end.
    """
    lines = page.read_text().splitlines()
    blocks = []
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence is None:
            place = f"{page.relative_to(ROOT)}:{number + 1}"
            assert not lines[number].lstrip().startswith(("```", "~~~")), f"{place}: no language"
            number += 1
            continue
        start = number + 1
        closing = f"{fence['indent']}```"
        assert closing in lines[start:], f"{page.relative_to(ROOT)}:{start}: a block without an end"
        end = lines.index(closing, start)
        title = re.search(r'title="([^"]*)"', fence["attributes"])
        blocks.append(
            Block(
                page,
                start + 1,
                fence["language"],
                title[1] if title else "",
                textwrap.dedent("\n".join(lines[start:end])) + "\n",
                _reason(lines[:number]),
            )
        )
        number = end + 1
    return blocks


def _reason(before: list[str]) -> str:
    last = next((line for line in reversed(before) if line.strip()), "")
    marked = _NOT_RUN.match(last)
    return marked["reason"] if marked else ""


def _first_words(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line.strip()]


class Page:
    """A page being run, in the current folder, which is its own."""

    def __init__(self) -> None:
        self._module = types.ModuleType("document")
        self._printed = ""
        self._run: Mapping[str, Callable[[Block], None]] = {
            "python": self._python,
            "sh": self._sh,
            "text": self._text,
            "toml": self._toml,
        }

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Import from the current folder inside the block, and forget afterwards what was."""
        path, modules = list(sys.path), set(sys.modules)
        sys.path.insert(0, str(Path.cwd()))
        sys.modules[self._module.__name__] = self._module
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                file = getattr(sys.modules[name], "__file__", None)
                if name == self._module.__name__ or (file and Path.cwd() in Path(file).parents):
                    del sys.modules[name]

    def run(self, block: Block) -> None:
        """Run one block, after those above it.

        Raises:
            Exception: what the block raises.
            AssertionError: a command fails, or output is not what the page says.
        """
        if block.reason:
            return
        included = _INCLUDED.match(block.code.strip())
        if included:
            assert (ROOT / included["path"]).is_file(), f"{block.place}: no {included['path']}"
            return
        assert block.language in self._run, (
            f"{block.place}: a {block.language} block is put in from a file of the repository, "
            "with --8<--, or says why it does not run"
        )
        self._run[block.language](block)

    def _python(self, block: Block) -> None:
        # TorchScript reads sources from files; errors show the page's own line numbers.
        file = Path(block.title or f"{block.page.stem}-line-{block.line}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n" * (0 if block.title else block.line - 1) + block.code)
        with self._capturing():
            if block.title:
                runpy.run_path(str(file), run_name=file.stem)
            else:
                self._module.__file__ = str(file.resolve())
                code = compile(file.read_text(), str(file.resolve()), "exec")
                exec(code, vars(self._module))

    def _sh(self, block: Block) -> None:
        with self._capturing():
            for line in re.sub(r"\\\n\s*", "", block.code).splitlines():
                command = re.sub(r"\s#.*$", "", line).strip()
                if command and not command.startswith("#"):
                    self._command(command, block)

    def _command(self, command: str, block: Block) -> None:
        program, _, rest = command.partition(" ")
        if program == "make":
            makefile = (ROOT / "Makefile").read_text()
            targets = [word for word in rest.split() if "=" not in word]
            for target in targets:
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{block.place}: {target}"
        elif program == "amp-script" and not _SHELL.search(re.sub("'[^']*'", "", rest)):
            with warnings.catch_warnings():
                warnings.simplefilter("default")
                code = run_amp_script(shlex.split(rest))
            assert code == 0, f"{block.place}: exit code {code}: {command}"
        else:
            self._bash(command, block)

    def _bash(self, command: str, block: Block) -> None:
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            env={**os.environ, "PATH": programs},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        print(done.stdout, end="")
        assert done.returncode == 0, f"{block.place}: {command}\n{done.stdout}"

    def _text(self, block: Block) -> None:
        if block.title == "Output":
            same = doctest.OutputChecker().check_output(
                block.code, self._printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            )
        elif block.title == "Output, for example":
            same = _first_words(block.code) == _first_words(self._printed)
        else:
            return
        assert same, f"{block.place}: printed was\n{self._printed}"

    def _toml(self, block: Block) -> None:
        tomlkit.parse(block.code)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield
        finally:
            self._printed = printed.getvalue()
            print(self._printed, end="")
