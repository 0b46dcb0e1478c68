"""The text of a stub for a described module."""

from __future__ import annotations

import ast
import builtins
import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from torch.jit._script import RecursiveScriptModule

from amp_script.stubgen.annotations import Annotation, is_defined_by_program, python_names
from amp_script.stubgen.program import Definition, Member, Method, Module, Parameter

__all__ = ["render"]

_INDENT: Final = "    "

_OVERRIDES: Final = (
    "  # type: ignore[assignment, misc, override, unused-ignore]  # torch has it too"
)
"""Where a program's name is also one of ``torch.jit.ScriptModule``, with another type."""

_BASES: Final[Mapping[str, str]] = {
    "enum": "enum.Enum",
    "interface": "typing.Protocol",
    "tuple": "typing.NamedTuple",
}

_IN_TEXTS: Final = frozenset(
    {
        *_BASES.values(),
        "builtins.NotImplementedError",
        "torch.jit.ScriptModule",
        "typing.Any",
        "typing.Final",
    }
)
"""Python names that a stub is written with, beside those of types."""

_NOT_IMPORTED_BY_TORCH: Final = frozenset({"torch.distributed.rpc"})

_TAKEN_BY_TORCH: Final = frozenset(dir(RecursiveScriptModule)) - {"forward"}
_TAKEN_BY_TUPLE: Final = frozenset(dir(tuple))


def render(
    module: Module,
    definitions: Mapping[str, Definition],
    class_name: str,
    *,
    summary: str = "",
    inputs: Iterable[str] = (),
    importable: bool = False,
) -> str:
    """Write a stub.

    Args:
        module: the module.
        definitions: the types that it mentions, by their names in the program.
        class_name: name of the class for the module.
        summary: more about the module than its name, for its docstring.
        inputs: a line about each input of ``forward``, for its docstring.
        importable: write a module that may be imported instead of a stub file.
    """
    names = _Names(module, definitions, class_name)
    writer = _Writer(names, importable, tuple(inputs))
    classes = [*writer.definitions(definitions), list(writer.module(class_name, module, summary))]
    gap = "\n\n\n" if importable else "\n\n"
    head = writer.head(module, definitions)
    return gap.join("\n".join(lines) for lines in [head, *classes]) + "\n"


# --- names ----------------------------------------------------------------------------------------


class _Names:
    """Spells types so that no name of the program stands in the way."""

    def __init__(
        self, module: Module, definitions: Mapping[str, Definition], class_name: str
    ) -> None:
        members = {name for part in module.walk() for name in _member_names(part)}
        members |= {name for definition in definitions.values() for name in _names_in(definition)}
        self._imported: dict[str, set[str]] = {}
        self._defined: dict[str, str] = {}
        spelled = {_bound(name) for name in python_names() | _IN_TEXTS}
        taken = members | {class_name} | spelled
        first: dict[tuple[str, Definition], str] = {}
        for qualified, definition in definitions.items():
            key = (_short(qualified), definition)
            if key not in first:
                first[key] = _free(_identifier(_short(qualified)), taken)
                taken.add(first[key])
            self._defined[qualified] = first[key]
        self.top_level = frozenset(taken - members)
        self._taken = members | {class_name, *first.values()}
        self.default = _free("_default", self._taken)

    def defined(self, qualified: str) -> str:
        """Name in the stub of a type that the program defines."""
        return self._defined[qualified]

    def spell(self, name: str) -> str:
        """Text for a full Python name, or for a type that the program defines."""
        if is_defined_by_program(name):
            return self._defined.get(name, self.spell("torch.ScriptObject"))
        module, _, short = name.rpartition(".")
        if module == "builtins" and self._alias(short) == short:
            return short
        if _bound(name) == short:
            return self._import(module, short)
        top, _, rest = name.partition(".")
        self._import("", module if module in _NOT_IMPORTED_BY_TORCH else top)
        return f"{self._alias(top)}.{rest}"

    def _import(self, module: str, name: str) -> str:
        self._imported.setdefault(module, set()).add(self.binding(name))
        return self._alias(name.partition(".")[0])

    def binding(self, name: str) -> str:
        """What an import statement says of a name, so that it binds one that is free."""
        top = name.partition(".")[0]
        alias = self._alias(top)
        # `import a.b as _a` would bind b.
        return name if alias == top else f"{top} as {alias}"

    def _alias(self, name: str) -> str:
        return _free(f"_{name}", self._taken) if name in self._taken else name

    def value(self, text: str) -> str:
        """Text for a constant; infinity and NaN are written with a name of Python."""
        float_ = self.spell("builtins.float") if 'float("' in text else "float"
        if float_ == "float":
            return text
        tree = ast.parse(text, mode="eval")
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                node.id = float_
        return ast.unparse(tree)

    def imports(self) -> list[str]:
        """Import statements for everything that was spelled."""
        plain = [f"import {name}" for name in sorted(self._imported.pop("", ()))]
        return plain + [
            f"from {module} import {', '.join(sorted(names))}"
            for module, names in sorted(self._imported.items())
        ]


def _member_names(module: Module) -> Iterator[str]:
    for members in (module.constants, module.parameters, module.buffers, module.attributes):
        yield from (member.name for member in members)
    yield from (method.name for method in module.methods)
    yield from (name for name, _ in module.children)


def _names_in(definition: Definition) -> Iterator[str]:
    yield from (member.name for member in definition.members)
    yield from (method.name for method in definition.methods)


def _bound(name: str) -> str:
    """The name that an import binds for a full Python name: its last part, or its package."""
    module, _, short = name.rpartition(".")
    by_itself = module in ("builtins", "enum", "typing") or name == "torch.Tensor"
    return short if by_itself else name.partition(".")[0]


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _identifier(name: str) -> str:
    """The nearest name that Python can hold."""
    cleaned = re.sub(r"\W", "_", name)
    if not cleaned or cleaned[0].isdigit():
        cleaned = f"_{cleaned}"
    return f"{cleaned}_" if keyword.iskeyword(cleaned) else cleaned


def _holds(name: str) -> bool:
    return name == _identifier(name)


def _class_name_for(attribute: str) -> str:
    words = re.split(r"[\W_]+", attribute)
    name = "".join(word[:1].upper() + word[1:] for word in words)
    return f"Item{name}" if not name or name[0].isdigit() else _identifier(name)


def _free(name: str, taken: Iterable[str]) -> str:
    occupied = {*taken, *dir(builtins)}
    number, free = 1, name
    while free in occupied:
        number += 1
        free = f"{name}{number}"
    return free


# --- text -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Writer:
    names: _Names
    importable: bool
    inputs: tuple[str, ...]

    def head(self, module: Module, definitions: Mapping[str, Definition]) -> list[str]:
        about = f"Types of the TorchScript module {module.original_name}, written by amp-script."
        annotations = self.names.binding("annotations")
        future = ["", f"from __future__ import {annotations}"] if self.importable else []
        methods = [method for part in module.walk() for method in part.methods]
        methods += [method for definition in definitions.values() for method in definition.methods]
        has_unknown = self.importable and any(map(_has_unknown_default, methods))
        unknown = self.names.spell("typing.Any") if has_unknown else ""
        imports = self.names.imports()
        about_default = "# for a value that the program holds"
        stand_in = ["", f"{self.names.default}: {unknown} = ...  {about_default}"]
        return [f'"""{about}"""', *future, "", *imports, *(stand_in if unknown else [])]

    def definitions(self, definitions: Mapping[str, Definition]) -> Iterator[list[str]]:
        written = set()
        for qualified in _in_order(definitions):
            name = self.names.defined(qualified)
            if name not in written:
                written.add(name)
                yield list(self._definition(name, qualified, definitions[qualified]))

    def _definition(self, name: str, qualified: str, definition: Definition) -> Iterator[str]:
        base = _BASES.get(definition.kind)
        yield f"class {name}{(base and f'({self.names.spell(base)})') or ''}:"
        if name != _short(qualified):
            yield f"{_INDENT}# In the program: {qualified}"
        body = [
            f"{member.name}: {self._type(member.annotation)}{_hides(member.name, tuple_=True)}"
            if member.value is None
            else f"{member.name} = {self.names.value(member.value)}"
            for member in definition.members
        ]
        for method in definition.methods:
            body += self._method(method, hides=False)
        yield from _indented(_class_body(body))

    def module(
        self, name: str, module: Module, summary: str = "", *, outermost: bool = True
    ) -> Iterator[str]:
        yield f"class {name}({self.names.spell('torch.jit.ScriptModule')}):"
        about = module.original_name + (summary and f", {summary}")
        body = [f'"""TorchScript module {about}."""', ""] if outermost else []
        classes = self._classes_of_children(name, module)
        written = set()
        for attribute, child in module.children:
            child_name = classes[attribute]
            if child_name not in written:
                written.add(child_name)
                body += [*self.module(child_name, child, outermost=False), ""]
        for title, members in (
            ("Constants", module.constants),
            ("Parameters", module.parameters),
            ("Buffers", module.buffers),
            ("Attributes", module.attributes),
        ):
            if members:
                body += ["", f"# {title}"]
                body += [line for member in members for line in self._member(member)]
        if module.children:
            body += ["", "# Submodules"]
            body += [self._child(attribute, classes[attribute]) for attribute, _ in module.children]
        for method in module.methods:
            docstring = self.inputs if outermost and method.name == "forward" else ()
            body += ["", *self._method(method, docstring)]
            if method.name == "forward":
                called = Method("__call__", method.parameters, method.result)
                body += [*[""] * self.importable, *self._method(called, hides=False)]
        yield from _indented(_class_body(body))

    def _classes_of_children(self, parent: str, module: Module) -> dict[str, str]:
        """Names of the nested classes by attribute; equal modules share one."""
        taken = {parent, *self.names.top_level, *_member_names(module)}
        by_module: dict[Module, str] = {}
        result = {}
        for attribute, child in module.children:
            if child not in by_module:
                by_module[child] = _free(_class_name_for(attribute), taken)
                taken.add(by_module[child])
            result[attribute] = by_module[child]
        return result

    def _child(self, attribute: str, class_name: str) -> str:
        if _holds(attribute):
            return f"{attribute}: {class_name}{_hides(attribute)}"
        return _noted(attribute, class_name)

    def _member(self, member: Member) -> Iterator[str]:
        note = _hides(member.name)
        if not _holds(member.name):
            yield _noted(member.name, self._type(member.annotation))
        elif member.value is None:
            yield f"{member.name}: {self._type(member.annotation)}{note}"
        else:
            final = self.names.spell("typing.Final")
            kind = "" if member.annotation is None else f"[{self._type(member.annotation)}]"
            yield f"{member.name}: {final}{kind} = {self.names.value(member.value)}{note}"

    def _method(
        self, method: Method, docstring: tuple[str, ...] = (), *, hides: bool = True
    ) -> Iterator[str]:
        parameters = ", ".join(self._parameters(method.parameters))
        note = _hides(method.name) if hides else ""
        result = self._type(method.result)
        lines = _docstring(docstring) if docstring else []
        error = self.names.spell("builtins.NotImplementedError") if self.importable else ""
        body = [*lines, f"raise {error}"] if error else lines
        head = f"def {method.name}({parameters}) -> {result}:"
        if body:
            yield head + note
            yield from _indented(body)
        else:
            yield f"{head} ...{note}"

    def _parameters(self, parameters: tuple[Parameter, ...]) -> Iterator[str]:
        positional = [index for index, part in enumerate(parameters) if not _holds(part.name)]
        names = _parameter_names(parameters)
        keyword_only = False
        # Checkers take another name than self for the receiver where it is a private one.
        yield _free("_self", names) if "self" in names else "self"
        for index, parameter in enumerate(parameters):
            if parameter.keyword_only and not keyword_only:
                keyword_only = True
                yield "*"
            text = f"{names[index]}: {self._type(parameter.annotation)}"
            default = parameter.default
            if default == "..." and self.importable:
                default = self.names.default
            yield text if default is None else f"{text} = {self.names.value(default)}"
            if positional and index == positional[-1]:
                yield "/"

    def _type(self, annotation: Annotation | None) -> str:
        return (
            self.names.spell("typing.Any")
            if annotation is None
            else annotation.python(self.names.spell)
        )


def _parameter_names(parameters: tuple[Parameter, ...]) -> list[str]:
    """Names that Python can hold, each once."""
    taken = {parameter.name for parameter in parameters if _holds(parameter.name)}
    names = []
    for parameter in parameters:
        name = parameter.name
        if not _holds(name):
            name = _free(_identifier(name), taken)
            taken.add(name)
        names.append(name)
    return names


def _has_unknown_default(method: Method) -> bool:
    """Whether a default has no text, which a stub file may leave out and a module may not."""
    return any(parameter.default == "..." for parameter in method.parameters)


def _docstring(inputs: tuple[str, ...]) -> list[str]:
    escaped = (line.replace("\\", r"\\").replace('"""', r"\"\"\"") for line in inputs)
    return ['"""Run the model.', "", "Args:", *(f"{_INDENT}{line}" for line in escaped), '"""']


def _noted(name: str, kind: str) -> str:
    """About an attribute whose name Python cannot hold."""
    return f"# {name!r}: {kind}, reached by getattr(module, {name!r})"


def _hides(name: str, *, tuple_: bool = False) -> str:
    taken = _TAKEN_BY_TUPLE if tuple_ else _TAKEN_BY_TORCH
    return _OVERRIDES if name in taken else ""


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield _INDENT + line if line else ""


def _class_body(lines: list[str]) -> list[str]:
    """Lines that make a class body, without blank ones at its ends and in pairs."""
    kept = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]
    if kept and not kept[-1]:
        kept.pop()
    only_comments = all(line.lstrip().startswith("#") or not line for line in kept)
    return [*kept, "..."] if only_comments else kept


def _in_order(definitions: Mapping[str, Definition]) -> Iterator[str]:
    """Names of the definitions, those that others are made of first."""
    done: set[str] = set()

    def visit(name: str) -> Iterator[str]:
        if name in done or name not in definitions:
            return
        done.add(name)
        for member in definitions[name].members:
            for part in member.annotation.walk() if member.annotation else ():
                yield from visit(part.name)
        yield name

    for name in definitions:
        yield from visit(name)
