"""Docstrings are written with Sphinx's roles here and there; on the site they are plain code."""

from __future__ import annotations

import re
from typing import Any, Final

import griffe

_ROLE: Final = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")
_DOUBLE: Final = re.compile(r"``([^`]+)``")


def without_roles(docstring: str) -> str:
    """Turn ``:class:`Name``` into ```Name```, and leave off the package that all names share."""
    text = _ROLE.sub(lambda match: f"`{_short(match[1])}`", docstring)
    return _DOUBLE.sub(r"`\1`", text)


class PlainRoles(griffe.Extension):
    """Rewrites the docstrings that mkdocstrings shows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object; what ``__init__`` takes is in the class's."""
        if obj.name == "__init__":
            obj.docstring = None
        elif obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)


def _short(name: str) -> str:
    return name.rpartition(".")[2] if name.startswith("amp_script.") else name
