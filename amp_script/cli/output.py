"""What a command shows: results on standard output; progress, warnings and errors on standard
error. Progress appears on a terminal only, so that a pipe or a log gets no more than it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

__all__ = ["error", "line", "size", "step", "table", "warning"]


def line(text: str) -> None:
    """Print one line of a result."""
    Console().print(text, markup=False, highlight=False, soft_wrap=True)


def table(rows: Iterable[tuple[str, str]]) -> None:
    """Print a result's names and values in two columns."""
    named = list(rows)
    width = max(len(name) for name, _ in named)
    for name, value in named:
        Console().print(
            f"[bold]{escape(name.ljust(width))}[/]  {escape(value)}",
            highlight=False,
            soft_wrap=True,
        )


def error(text: str) -> None:
    """Print an error as one line."""
    _notice("error", "bold red", text)


def warning(text: str) -> None:
    """Print a warning as one line."""
    _notice("warning", "bold yellow", text)


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


def size(count: int) -> str:
    """Write a number of bytes for people, such as ``43.4 MiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"


def _notice(kind: str, style: str, text: str) -> None:
    Console(stderr=True).print(
        f"[{style}]{kind}:[/] {escape(text)}", highlight=False, soft_wrap=True
    )
