"""Tables for people, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

__all__ = ["UNKNOWN", "Table", "counts_table", "dtype_name", "size", "submodule_label"]

UNKNOWN: Final = "unknown"
"""What stands where the program does not tell."""


@dataclass(frozen=True)
class Table:
    """A table of text.

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

    def printable(self) -> Table:
        """The table with escapes for what a terminal would act on."""
        rows = [tuple(map(_printable, row)) for row in self.rows]
        return replace(self, rows=rows)

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


def _printable(text: str) -> str:
    """A text on one line, with escapes in the place of control characters."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def counts_table(
    title: str, heading: str, counts: Mapping[str, Mapping[torch.dtype | None, int]]
) -> Table:
    """A table of counts, a column a dtype, those of fewest bits first and the unknown last."""
    dtypes = sorted({dtype for found in counts.values() for dtype in found}, key=_rank)
    rows = [
        (name, *(str(found.get(dtype) or "") for dtype in dtypes)) for name, found in counts.items()
    ]
    headings = (heading, *map(dtype_name, dtypes))
    return Table(title, headings, rows, numbers=len(dtypes))


def _rank(dtype: torch.dtype | None) -> tuple[int, int, str]:
    if dtype is None:
        return (2, 0, "")
    return (not dtype.is_floating_point, dtype.itemsize, str(dtype))


def dtype_name(dtype: torch.dtype | None, unknown: str = UNKNOWN) -> str:
    """The name of a dtype without its module."""
    return unknown if dtype is None else str(dtype).removeprefix("torch.")


def submodule_label(name: str | None) -> str:
    """A submodule's name for people."""
    return UNKNOWN if name is None else name or "(the module itself)"


def size(count: int) -> str:
    """Write a number of bytes for people, such as ``43.39 MiB``."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} GiB"
