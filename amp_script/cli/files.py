"""Where a command may write."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from amp_script.errors import UsageError

__all__ = ["require_free", "require_plots"]


def require_free(file: Path, force: bool) -> None:
    """Refuse a name that cannot be written, or that is taken and must not be replaced.

    Raises:
        UsageError: says which, and what to do.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder: expected the name of a file after -o")
    if not file.parent.is_dir():
        raise UsageError(f"no folder {file.parent} to write {file.name} into")
    if file.exists() and not force:
        raise UsageError(f"{file} exists: pass --force to replace it, or another name after -o")


def require_plots(file: Path) -> None:
    """Refuse to start what could not be drawn in the end.

    Raises:
        UsageError: matplotlib is missing, or does not write such files.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--plot needs matplotlib, which is not installed: pip install 'amp-script[plot]'"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in known:
        raise UsageError(
            f"--plot {file}: expected a name that ends in .{', .'.join(sorted(known))}"
        )
