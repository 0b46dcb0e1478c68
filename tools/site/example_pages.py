"""The examples that there are, and what each says of itself."""

from __future__ import annotations

import ast
from pathlib import Path

from markdown_text import cell, table

__all__ = ["examples"]

_FOLDER = Path(__file__).parents[2] / "examples"


def examples() -> str:
    """A table of the programs in ``examples/``, with the first sentence of each."""
    files = sorted([*_FOLDER.rglob("*.py"), *_FOLDER.rglob("*.cpp")])
    rows = [
        (f"`{file.relative_to(_FOLDER.parent).as_posix()}`", cell(_first_sentence(file)))
        for file in files
        if _is_program(file)
    ]
    return table(["program", "what it shows"], rows)


def _is_program(file: Path) -> bool:
    text = file.read_text()
    return file.name == "__main__.py" or "__main__" in text or "int main(" in text


def _first_sentence(file: Path) -> str:
    text = file.read_text()
    if file.suffix == ".py":
        return (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0]
    return text.partition("\n")[0].removeprefix("// ")
