"""What a command shows: results on standard output; progress, warnings and errors on standard
error. Progress appears on a terminal only, so that a pipe or a log gets no more than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
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
from rich.table import Table as Grid
from rich.text import Text

from amp_script.tables import Table, printable, size

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
    named = [(printable(name), printable(value)) for name, value in rows]
    width = max(len(name) for name, _ in named)
    for name, value in named:
        Console().print(
            f"[bold]{escape(name.ljust(width))}[/]  {escape(value)}",
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )


def grid(contents: Table) -> None:
    """Print a table with headings.

    A terminal gets long names folded. In a pipe, and where numbers would have to be cut or names
    to be folded into slivers, lines are as long as they need to be.
    """
    console, unlimited = Console(), Console(width=_UNLIMITED)
    shown = Grid(
        box=SIMPLE_HEAD if console.is_terminal else None,
        collapse_padding=console.is_terminal,  # beside the box, which is another space
        pad_edge=False,
        show_edge=False,
    )
    first_number = len(contents.headings) - contents.numbers
    for index, heading in enumerate(contents.headings):
        number = index >= first_number
        justify: Literal["left", "right"] = "right" if number else "left"
        shown.add_column(heading, justify=justify, overflow="fold", no_wrap=number)
    for row in contents.rows:
        shown.add_row(*map(Text, row))
    columns = list(zip(contents.headings, *contents.rows, strict=True))
    widths = [max(map(cell_len, column)) for column in columns[:first_number]]
    least = max(_LEAST_FOLDED, *map(cell_len, contents.headings[:first_number]))
    foldable = sum(max(0, width - least) for width in widths)
    fits = unlimited.measure(shown).maximum - foldable <= console.width
    (console if console.is_terminal and fits else unlimited).print(shown)


_UNLIMITED: Final = 10_000
"""Columns of what is no terminal."""

_LEAST_FOLDED: Final = 8
"""Columns that a folded name has at least; headings stay whole."""


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
