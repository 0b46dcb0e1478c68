"""The Python reference: which names there are; their docstrings are read by mkdocstrings."""

from __future__ import annotations

import inspect

import amp_script
from docstring_roles import without_roles
from amp_script import errors as errors_module
from markdown_text import cell, table

__all__ = ["errors", "public_names"]


def public_names() -> str:
    """Every name of the package: a table of them, and then each with its docstring."""
    names = sorted(amp_script.__all__, key=str.lower)
    rows = [
        (f"[`{name}`](#amp_script.{name})", cell(_summary(getattr(amp_script, name))))
        for name in names
    ]
    return "\n".join([table(["name", "what it is"], rows), *map(_entry, names)])


def errors() -> str:
    """Every error of the library's own, in the order of the module."""
    classes = [
        name
        for name, each in vars(errors_module).items()
        if inspect.isclass(each) and each.__module__ == errors_module.__name__
    ]
    return "\n".join(f"::: amp_script.errors.{name}\n" for name in classes)


def _entry(name: str) -> str:
    return f"::: amp_script.{name}\n"


def _summary(value: object) -> str:
    return without_roles(inspect.getdoc(value) or "").partition("\n\n")[0]
