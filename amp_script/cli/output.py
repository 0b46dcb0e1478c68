"""What a command shows: results on standard output; progress, warnings and errors on standard
error. Progress appears on a terminal only, so that a pipe or a log gets no more than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from amp_script.report.tables import size

__all__ = [
    "error",
    "grid",
    "line",
    "one_line",
    "progress",
    "size",
    "stages",
    "step",
    "table",
    "warning",
]


def line(text: str) -> None:
    """Print one line of a result."""
    Console().print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


def table(rows: Iterable[tuple[str, str]]) -> None:
    """Print a result's names and values in two columns."""
    named = list(rows)
    width = max(len(name) for name, _ in named)
    for name, value in named:
        Console().print(
            f"[bold]{escape(name.ljust(width))}[/]  {escape(value)}",
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )


def grid(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: int = 0) -> None:
    """Print a table with headings; in a pipe its lines are as long as they need to be.

    Args:
        headings: of the columns.
        rows: cells, as many as there are headings.
        right: how many of the last columns hold numbers, which are aligned on the right.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_UNLIMITED)
    shown = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for index, heading in enumerate(headings):
        number = index >= len(headings) - right
        justify: Literal["left", "right"] = "right" if number else "left"
        shown.add_column(heading, justify=justify, overflow="fold", no_wrap=number)
    for row in rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


_UNLIMITED = 10_000
"""Columns of what is no terminal."""


def error(text: str) -> None:
    """Print an error as one line."""
    _notice("error", "bold red", text)


def warning(text: str) -> None:
    """Print a warning as one line."""
    _notice("warning", "bold yellow", text)


def one_line(text: str) -> str:
    """The lines of a message as one."""
    lines = (line.strip() for line in text.splitlines() if line.strip())
    return "; ".join(lines).replace(":; ", ": ", 1)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Say what is being done while the block runs, where a person is looking."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(escape(text)):
        yield
    console.print(f"[green]done[/green] {escape(text)}", highlight=False)


@contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while the block runs, where a person is looking; call what it yields ``total``
    times.
    """
    with _bars() as bars:
        task = bars.add_task(escape(text), total=total)
        yield lambda: bars.advance(task)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each stage of some work while the block runs, where a person is looking.

    What it yields is called with a stage's name, how many steps of it are over, and of how many, or
    0 where that is not known.
    """
    tasks: dict[str, TaskID] = {}
    with _bars() as bars:

        def show(text: str, done: int, total: int) -> None:
            if text not in tasks:
                tasks[text] = bars.add_task(escape(text), total=total or None)
            bars.update(tasks[text], completed=done)

        yield show
        for task in tasks.values():
            bars.update(task, total=bars.tasks[task].completed)


def _bars() -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _notice(kind: str, style: str, text: str) -> None:
    Console(stderr=True).print(
        f"[{style}]{kind}:[/] {escape(text)}", highlight=False, soft_wrap=True
    )
