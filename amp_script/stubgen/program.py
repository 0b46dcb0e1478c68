"""What a ScriptModule offers to Python, as plain data.

Methods come from their schemas and attributes from the module's type, so that a live module need
not be one that can be saved. Classes, enums, named tuples and interfaces have no reader in Python:
those that a module mentions are exported with an empty function that takes them, and read from the
program text in that archive.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ConcreteModuleType``,
``torch._C.Graph`` with ``addInput`` and ``insertConstant``, ``torch._C.CompilationUnit`` with
``create_function``, and a script module's ``_c``.
"""

from __future__ import annotations

import ast
import io
import math
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import torch

from amp_script.errors import StubsError
from amp_script.stubgen.annotations import Annotation, is_defined_by_program

__all__ = ["Definition", "Member", "Method", "Module", "Parameter", "describe", "literal"]

_OWN_ATTRIBUTES: Final = frozenset({"training", "_is_full_backward_hook"})
"""Attributes of every module, which ``nn.Module`` declares."""

Kind = Literal["class", "enum", "interface", "tuple"]

_KINDS: Final[dict[str, Kind]] = {
    "": "class",
    "Enum": "enum",
    "Interface": "interface",
    "ModuleInterface": "interface",
    "NamedTuple": "tuple",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method; ``default`` is Python text, ``"..."`` for a value with none."""

    name: str
    annotation: Annotation
    default: str | None = None
    keyword_only: bool = False


@dataclass(frozen=True)
class Method:
    """A method and its signature, without ``self``."""

    name: str
    parameters: tuple[Parameter, ...]
    result: Annotation


@dataclass(frozen=True)
class Member:
    """An attribute; ``value`` is Python text where the value is constant."""

    name: str
    annotation: Annotation | None
    value: str | None = None


@dataclass(frozen=True)
class Definition:
    """A type that came with the program."""

    kind: Kind
    members: tuple[Member, ...]
    methods: tuple[Method, ...]


@dataclass(frozen=True)
class Module:
    """A module: equal to another one if Python cannot tell their types apart."""

    original_name: str = field(compare=False)
    constants: tuple[Member, ...]
    parameters: tuple[Member, ...]
    buffers: tuple[Member, ...]
    attributes: tuple[Member, ...]
    methods: tuple[Method, ...]
    children: tuple[tuple[str, Module], ...]

    def walk(self) -> Iterator[Module]:
        """This module and every module inside it."""
        yield self
        for _, child in self.children:
            yield from child.walk()


def describe(module: torch.jit.ScriptModule) -> tuple[Module, dict[str, Definition]]:
    """Describe a module, and by name the types that it mentions."""
    mentioned: dict[str, Any] = {}
    described = _describe_module(module, mentioned)
    return described, _define(mentioned.values())


# --- modules --------------------------------------------------------------------------------------


def _describe_module(module: torch.jit.ScriptModule, mentioned: dict[str, Any]) -> Module:
    concrete: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
    attributes = {
        name: (Member(name, _annotation(kind, mentioned)), is_parameter)
        for name, (kind, is_parameter) in concrete.get_attributes().items()
        if name not in _OWN_ATTRIBUTES
    }
    children = tuple(
        (name, _describe_module(child, mentioned))
        for name, child in module.named_children()
        if isinstance(child, torch.jit.ScriptModule)
    )
    buffers = {name for name, _ in module.named_buffers(recurse=False)}
    members = [member for member, _ in attributes.values()]
    parameters = tuple(member for member, is_parameter in attributes.values() if is_parameter)
    methods = [module._c._get_method(name) for name in module._c._method_names()]
    return Module(
        original_name=module.original_name,
        constants=tuple(
            Member(name, _annotation_of_value(value), literal(value))
            for name, value in sorted(concrete.get_constants().items())
        ),
        parameters=_sorted(parameters),
        buffers=_sorted(member for member in members if member.name in buffers),
        attributes=_sorted(
            member for member in members if member.name not in buffers and member not in parameters
        ),
        methods=tuple(
            _describe_method(method.name, method.schema, mentioned)
            for method in methods
            # Operators and properties are compiled, and not reached from Python.
            if not method.name.startswith("__")
        ),
        children=children,
    )


def _sorted(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda member: member.name))


def _describe_method(name: str, schema: Any, mentioned: dict[str, Any]) -> Method:
    parameters = tuple(
        Parameter(
            argument.name,
            _annotation(argument.type, mentioned),
            literal(argument.default_value) if argument.has_default_value() else None,
            argument.kwarg_only,
        )
        for argument in schema.arguments[1:]
    )
    (result,) = schema.returns
    return Method(name, parameters, _annotation(result.type, mentioned))


def _annotation(kind: Any, mentioned: dict[str, Any]) -> Annotation:
    annotation = Annotation.parse(kind.annotation_str)
    if any(is_defined_by_program(part.name) for part in annotation.walk()):
        mentioned[kind.annotation_str] = kind
    return annotation


def _annotation_of_value(value: object) -> Annotation | None:
    """The type of a constant, where its values have one that says more than the value."""
    if isinstance(value, (tuple, list)):
        parts = [_annotation_of_value(part) for part in value]
        return Annotation("Tuple", tuple(part for part in parts if part is not None))
    names = {bool: "bool", int: "int", float: "float", str: "str", complex: "complex"}
    return Annotation(names[type(value)]) if type(value) in names else None


def literal(value: object) -> str:
    """Python text for a value, ``"..."`` where there is none that a stub can hold."""
    if type(value) in (list, tuple):
        assert isinstance(value, (list, tuple))
        parts = [literal(part) for part in value]
        if "..." in parts:
            return "..."
        opening, closing = "[]" if isinstance(value, list) else "()"
        only = "," if isinstance(value, tuple) and len(parts) == 1 else ""
        return opening + ", ".join(parts) + only + closing
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value) if type(value) in (bool, int, float, complex, str, type(None)) else "..."


# --- types that the program defines ---------------------------------------------------------------


def _define(types: Iterable[Any]) -> dict[str, Definition]:
    definitions: dict[str, Definition] = {}
    with zipfile.ZipFile(io.BytesIO(_export(types))) as archive:
        for name in archive.namelist():
            _, _, path = name.partition("/code/")
            if path.endswith(".py"):
                module = path.removesuffix(".py").replace("/", ".")
                text = archive.read(name).decode()
                definitions.update(_read_classes(module, text))
    return definitions


def _export(types: Iterable[Any]) -> bytes:
    """An archive of an empty function whose inputs have these types."""
    graph: Any = torch._C.Graph()
    for kind in types:
        graph.addInput().setType(kind)
    graph.registerOutput(graph.insertConstant(None))
    unit: Any = torch._C.CompilationUnit()
    archive: bytes = unit.create_function("mentions", graph).save_to_buffer()
    return archive


def _read_classes(module: str, text: str) -> Iterator[tuple[str, Definition]]:
    for lines in _class_blocks(text):
        try:
            (node,) = ast.parse("\n".join(lines)).body
        except SyntaxError as error:
            raise StubsError(f"cannot read {lines[0]!r} in {module}: {error}") from error
        assert isinstance(node, ast.ClassDef)
        base = ast.unparse(node.bases[0]) if node.bases else ""
        if base in _KINDS:
            yield f"{module}.{node.name}", _definition(_KINDS[base], node)


def _class_blocks(text: str) -> Iterator[list[str]]:
    """Each class of a program, its methods without their bodies."""
    block: list[str] = []
    in_signature = False
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent == 0:
            if block:
                yield block
            block = []
        if line.startswith("class ") or (block and indent == 2 and line.strip()):
            block.append(line)
            in_signature = line.startswith("  def ")
        elif block and in_signature:
            block.append(line)
        if in_signature and line.endswith(":"):
            block.append("    pass")
            in_signature = False
    if block:
        yield block


def _definition(kind: Kind, node: ast.ClassDef) -> Definition:
    members, methods = [], []
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            annotation = Annotation.parse(ast.unparse(part.annotation))
            members.append(Member(ast.unparse(part.target), annotation))
        elif isinstance(part, ast.Assign):
            members.append(Member(ast.unparse(part.targets[0]), None, _value_text(part.value)))
        elif isinstance(part, ast.FunctionDef):
            methods.append(_read_method(part))
    return Definition(kind, tuple(members), tuple(methods))


def _read_method(node: ast.FunctionDef) -> Method:
    arguments = node.args.args[1:]
    without = len(arguments) - len(node.args.defaults)
    defaults: list[ast.expr | None] = [*[None] * without, *node.args.defaults]
    parameters = tuple(
        Parameter(
            argument.arg,
            Annotation.parse(ast.unparse(argument.annotation)) if argument.annotation else ANY,
            None if default is None else _default_text(default),
        )
        for argument, default in zip(arguments, defaults, strict=True)
    )
    result = Annotation.parse(ast.unparse(node.returns)) if node.returns else ANY
    return Method(node.name, parameters, result)


def _default_text(node: ast.expr) -> str:
    try:
        return _value_text(node)
    except ValueError:
        return "..."


def _value_text(node: ast.expr) -> str:
    """Python text for a value in a program, where infinity and NaN stand as names.

    Raises:
        ValueError: no value that a stub can hold.
    """
    text = ast.unparse(node)
    is_name = text in ("inf", "-inf", "nan", "-nan")
    return literal(float(text) if is_name else ast.literal_eval(node))


ANY: Final = Annotation("Any")
