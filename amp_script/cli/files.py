"""Where a command may write."""

from __future__ import annotations

from pathlib import Path

from amp_script.errors import UsageError

__all__ = ["require_free"]


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
