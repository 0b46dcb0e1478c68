"""Tables for people, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "printable", "size"]


@dataclass(frozen=True)
class Table:
    """A table of text, with escapes for what a terminal would act on.

    Attributes:
        title: what it is about, or ``""``.
        headings: of the columns; empty ones where it has none.
        rows: cells, as many as there are headings.
        numbers: how many of the last columns hold numbers.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: int = 0

    def __post_init__(self) -> None:
        """Make every cell printable."""
        object.__setattr__(self, "rows", [tuple(map(printable, row)) for row in self.rows])

    def __str__(self) -> str:
        """The table in columns, numbers on the right."""
        rows = [*([self.headings] if any(self.headings) else []), *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [self.title] if self.title else []
        lines += [self._line(row, widths) for row in rows]
        return "\n".join(lines)

    def _line(self, row: Sequence[str], widths: Sequence[int]) -> str:
        first_number = len(widths) - self.numbers
        cells = [
            cell.rjust(width) if index >= first_number else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()


def printable(text: str) -> str:
    """A text on one line, with escapes in the place of control characters."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def size(count: int) -> str:
    """Write a number of bytes for people, such as ``43.39 MiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
