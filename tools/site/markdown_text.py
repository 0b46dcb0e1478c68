"""Small pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["cell", "code", "listed", "table"]


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its cells being Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Text as it may stand in a cell: on one line, without what would end it."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as code."""
    return f"`{text}`"


def listed(names: Iterable[str]) -> str:
    """Names as code, with commas between."""
    return ", ".join(map(code, names))
