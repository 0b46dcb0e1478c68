"""The Python reference: which names there are; their docstrings are read by mkdocstrings."""

from __future__ import annotations

import inspect
from types import ModuleType

from docstring_roles import without_roles
from markdown_text import cell, table

import amp_script
from amp_script import errors as errors_module

__all__ = ["errors", "names_of", "public_names"]


def public_names() -> str:
    """Every name of the package: a table of them, and then each with its docstring."""
    names = sorted(amp_script.__all__, key=str.lower)
    rows = [
        (f"[`{name}`](#amp_script.{name})", cell(_summary(getattr(amp_script, name))))
        for name in names
    ]
    return "\n".join([table(["name", "what it is"], rows), *map(_entry, names)])


def names_of(package: ModuleType) -> str:
    """Every name that a package exports and the library itself does not."""
    names = [name for name in package.__all__ if name not in amp_script.__all__]
    return "\n".join(f"::: {package.__name__}.{name}\n" for name in names)


def errors() -> str:
    """Every error of the library's own, in the order of the module."""
    classes = [
        name
        for name, each in vars(errors_module).items()
        if inspect.isclass(each) and each.__module__ == errors_module.__name__
    ]
    options = "    options:\n      show_bases: true\n"
    return "\n".join(f"::: amp_script.errors.{name}\n{options}" for name in classes)


def _entry(name: str) -> str:
    return f"::: amp_script.{name}\n"


def _summary(value: object) -> str:
    return without_roles(inspect.getdoc(value) or "").partition("\n\n")[0]
