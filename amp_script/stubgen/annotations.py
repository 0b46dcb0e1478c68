"""Types of TorchScript, as its ``annotation_str`` writes them, as a value and as Python text."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["Annotation", "is_defined_by_program", "python_names"]

_PLAIN: Final[Mapping[str, str]] = {
    "Any": "typing.Any",
    "AnyClassType": "typing.Any",
    "AnyEnumType": "enum.Enum",
    "AnyListType": "list[typing.Any]",
    "AnyTupleType": "tuple[typing.Any, ...]",
    "Capsule": "typing.Any",
    "Device": "torch.device",
    "Generator": "torch.Generator",
    "NoneType": "None",
    "PyObject": "typing.Any",
    "QScheme": "torch.qscheme",
    "Quantizer": "typing.Any",
    "Storage": "torch.UntypedStorage",
    "Stream": "torch.Stream",
    "Tensor": "torch.Tensor",
    "bool": "builtins.bool",
    "complex": "builtins.complex",
    "float": "builtins.float",
    "int": "builtins.int",
    "number": "builtins.int | builtins.float | builtins.complex",
    "str": "builtins.str",
}
"""Python for every TorchScript type that takes no others; a type that Python lacks is Any."""

_GENERIC: Final[Mapping[str, str]] = {
    "Await": "torch._awaits._Await",
    "Dict": "builtins.dict",
    "Future": "torch.futures.Future",
    "List": "builtins.list",
    "RRef": "torch.distributed.rpc.RRef",
    "Tuple": "builtins.tuple",
}

_SCRIPT_OBJECT: Final = "torch.ScriptObject"
"""Python for a class that C++ registers: it has methods, which only the dispatcher knows."""


def is_defined_by_program(name: str) -> bool:
    """Whether a type is a class, enum, named tuple or interface that came with the program."""
    return name.startswith("__torch__.") and not name.startswith("__torch__.torch.classes.")


def python_names() -> frozenset[str]:
    """Every Python name that a type is written with, such as ``"builtins.int"``."""
    trees = [ast.parse(text, mode="eval") for text in (*_PLAIN.values(), *_GENERIC.values())]
    return frozenset(ast.unparse(node) for tree in trees for node in _dotted(tree)) | {
        _SCRIPT_OBJECT
    }


@dataclass(frozen=True)
class Annotation:
    """A TorchScript type.

    Attributes:
        name: its name, such as ``"Tensor"``, ``"List"`` or ``"__torch__.models.Point"``.
        args: the types in its brackets.
    """

    name: str
    args: tuple[Annotation, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Annotation:
        """Read a type as TorchScript writes it, in a schema, a type or a saved program.

        Raises:
            ValueError: the text is no type.
        """
        try:
            return cls._of(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError as error:
            raise ValueError(f"not a TorchScript type: {text!r}") from error

    @classmethod
    def _of(cls, node: ast.expr) -> Annotation:
        if isinstance(node, (ast.Name, ast.Attribute)):
            return cls(ast.unparse(node))
        if isinstance(node, ast.Subscript):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            return cls(ast.unparse(node.value), tuple(cls._of(part) for part in inside))
        raise ValueError(f"not a TorchScript type: {ast.unparse(node)!r}")

    def walk(self) -> Iterator[Annotation]:
        """This type and every type inside it."""
        yield self
        for part in self.args:
            yield from part.walk()

    def python(self, spell: Callable[[str], str]) -> str:
        """The type in Python.

        Args:
            spell: gives the text for a full Python name, such as ``"builtins.int"``, and for the
                name of a type that the program defines.
        """
        if self.name in ("Optional", "Union"):
            parts = [part.python(spell) for part in self._alternatives()]
            return " | ".join(dict.fromkeys(parts))
        if self.name in _PLAIN:
            tree = ast.parse(_PLAIN[self.name], mode="eval")
            return ast.unparse(_Spelled(spell).visit(tree))
        if self.name in _GENERIC:
            inside = ", ".join(part.python(spell) for part in self.args)
            return f"{spell(_GENERIC[self.name])}[{inside or '()'}]"
        return spell(self.name if is_defined_by_program(self.name) else _unknown(self.name))

    def _alternatives(self) -> tuple[Annotation, ...]:
        if self.name == "Optional":
            return (*self.args, Annotation("NoneType"))
        none = Annotation("NoneType")
        return (*(part for part in self.args if part != none), *([none] * (none in self.args)))


def _unknown(name: str) -> str:
    return _SCRIPT_OBJECT if name.startswith("__torch__.torch.classes.") else "typing.Any"


def _dotted(tree: ast.AST) -> Iterator[ast.expr]:
    """The whole names in an expression, and not the names inside them."""
    if isinstance(tree, (ast.Attribute, ast.Name)):
        yield tree
        return
    for child in ast.iter_child_nodes(tree):
        yield from _dotted(child)


class _Spelled(ast.NodeTransformer):
    """Replaces whole names in an expression."""

    def __init__(self, spell: Callable[[str], str]) -> None:
        self._spell = spell

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.parse(self._spell(ast.unparse(node)), mode="eval").body
