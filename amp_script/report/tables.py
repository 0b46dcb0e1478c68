"""What the tables of a report have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from amp_script.dtypes import dtype_name
from amp_script.tables import Table

__all__ = ["UNKNOWN", "counts_table", "submodule_label"]

UNKNOWN: Final = "unknown"
"""What stands where the program does not tell."""


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


def submodule_label(name: str | None) -> str:
    """A submodule's name for people."""
    return UNKNOWN if name is None else name or "(the module itself)"
