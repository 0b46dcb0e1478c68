"""Where else a program runs: the oldest libtorch that reads its file, and the lite interpreter.

TorchScript refuses a file at load time for two reasons: its format version is higher than the
release reads, or it calls an operator, or gives one an argument, that the release lacks. Both are
known for each release: the format versions from the header ``caffe2/serialize/versions.h``, the
operators from the schemas in its ``libtorch_cpu`` (``operator_ages.txt``, written by
``tools/operator_ages.py``). What an older release computes in a dtype is another question.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._get_operator_version_map``,
``torch._C.parse_schema``, ``torch._C._create_function_from_graph``,
``torch._C.import_ir_module_from_buffer``, the C++ module's ``_save_to_buffer_for_mobile``,
``torch._C._load_for_lite_interpreter_from_buffer``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch

from amp_script.lowering._graph import (
    Graph,
    Node,
    Value,
    constant,
    is_constant,
    is_tensor,
    nodes_of,
)

__all__ = [
    "AGES_FILE",
    "Argument",
    "Release",
    "arguments_of",
    "oldest_libtorch",
    "runs_in_lite_interpreter",
    "unrecorded_operators",
]

Release: TypeAlias = "tuple[int, int]"
Argument: TypeAlias = "int | str"
"""A positional argument by its position, one by keyword by its name."""

AGES_FILE: Final = Path(__file__).with_name("operator_ages.txt")

_READERS: Final[Mapping[int, Release]] = {
    3: (1, 5),
    4: (1, 6),
    5: (1, 6),
    6: (1, 9),
    7: (1, 11),
    8: (1, 11),
    9: (1, 11),
    10: (1, 12),
}
"""First release that reads a file format version: ``kMaxSupportedFileFormatVersion`` in the
headers of 1.5 to 2.13. An archive has version 3, or that of its newest operator's semantics."""


@dataclass(frozen=True)
class _Ages:
    """Since which release libtorch has each operator, and arguments that came after it."""

    operators: Mapping[str, Release]
    later_arguments: Mapping[tuple[str, Argument], Release]


@cache
def _ages() -> _Ages:
    operators: dict[str, Release] = {}
    later: dict[tuple[str, Argument], Release] = {}
    section = ""
    for line in AGES_FILE.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line.startswith("#"):
            continue
        elif section == "later arguments":
            release, name, argument = line.split()
            key = int(argument) if argument.isdigit() else argument
            later[name, key] = _release(release)
        else:
            operators.update(dict.fromkeys(line.split(), _release(section)))
    return _Ages(operators, later)


def _release(text: str) -> Release:
    major, minor = text.split(".")
    return int(major), int(minor)


def oldest_libtorch(graphs: Iterable[Graph]) -> str | None:
    """The oldest release whose libtorch reads a file with these graphs, such as ``"1.12"``.

    Returns:
        ``None`` where an operator is not libtorch's own, or newer than the table.
    """
    oldest: Release = min(_READERS.values())
    for graph in graphs:
        for node in nodes_of(graph):
            needed = _needed(node)
            if needed is None:
                return None
            oldest = max(oldest, needed)
    return f"{oldest[0]}.{oldest[1]}"


def unrecorded_operators(graphs: Iterable[Graph]) -> tuple[str, ...]:
    """Operators because of which :func:`oldest_libtorch` is not known, with their overloads."""
    nodes = (node for graph in graphs for node in nodes_of(graph))
    return tuple(sorted({_qualified_name(node) for node in nodes if _needed(node) is None}))


def _qualified_name(node: Node) -> str:
    name, _, rest = node.schema().partition("(")
    return node.kind() if not name or rest == "no schema)" else name


def _needed(node: Node) -> Release | None:
    text = node.schema()
    if text == "(no schema)":
        return (1, 5) if node.kind().startswith("prim::") else None
    schema = torch._C.parse_schema(text)
    name = f"{schema.name}.{schema.overload_name}".rstrip(".")
    born = _ages().operators.get(name)
    if born is None:
        return None
    later = _ages().later_arguments
    arguments = [later.get((name, given), born) for given in _given(node, schema)]
    return max(born, _reader(name), *arguments)


def _reader(name: str) -> Release:
    """The first release that reads the semantics of an operator: see the file format versions."""
    entries = torch._C._get_operator_version_map().get(name, [])
    return max((_READERS[entry.bumped_at_version] for entry in entries), default=(1, 5))


def _given(node: Node, schema: torch._C.FunctionSchema) -> Iterator[Argument]:
    """Arguments that a file names: TorchScript leaves out those that have their default."""
    values = list(node.inputs())
    for argument, item, value in zip(arguments_of(schema), schema.arguments, values, strict=False):
        if not (item.has_default_value() and _is_constant_of(value, item.default_value)):
            yield argument


def _is_constant_of(value: Value, expected: object) -> bool:
    if not is_constant(value):
        return False
    held = constant(value)
    return not isinstance(held, torch.Tensor) and bool(held == expected)


def runs_in_lite_interpreter(graphs: Iterable[Graph]) -> bool | None:
    """Whether the lite interpreter takes programs with these graphs.

    Each graph is exported for it and loaded by it, with empty tensors for constants and with inputs
    in the place of its module's attributes.

    Returns:
        ``None`` where a graph needs its module for something else than attributes, such as a call
        through an interface.
    """
    answers = {_exports(graph) for graph in graphs}
    return next((answer for answer in (False, None) if answer in answers), True)


def _exports(graph: Graph) -> bool | None:
    skeleton = graph.copy()
    torch._C._jit_pass_inline(skeleton)
    _take_attributes_as_inputs(skeleton)
    if next(skeleton.inputs()).uses():
        return None
    skeleton.eraseInput(0)
    for node in nodes_of(skeleton):
        if node.kind() == "prim::Constant" and is_tensor(node.output()):
            node.t_("value", torch.empty(0))
    function: Any = torch._C._create_function_from_graph("forward", skeleton)
    try:
        return _takes(_imported(function.save_to_buffer()))
    except RuntimeError:
        return False


def _take_attributes_as_inputs(graph: Graph) -> None:
    modules = {next(graph.inputs()).debugName()}
    submodules: list[Node] = []
    for node in nodes_of(graph):
        if node.kind() not in ("prim::GetAttr", "prim::SetAttr"):
            continue
        if node.inputsAt(0).debugName() not in modules:
            continue
        if node.kind() == "prim::SetAttr":
            node.destroy()
        elif node.output().type().kind() in ("ClassType", "InterfaceType"):
            modules.add(node.output().debugName())
            submodules.append(node)
        else:
            given = graph.addInput()
            given.setType(node.output().type())
            node.output().replaceAllUsesWith(given)
            node.destroy()
    for node in reversed(submodules):
        if not node.output().uses():
            node.destroy()


def _imported(archive: bytes) -> Any:
    torch_c: Any = torch._C
    unit = torch_c.CompilationUnit()
    return torch_c.import_ir_module_from_buffer(unit, archive, None, {}, False)


def _takes(cpp_module: Any) -> bool:
    exported = cpp_module._save_to_buffer_for_mobile()
    torch._C._load_for_lite_interpreter_from_buffer(exported, None)
    return True


def arguments_of(schema: torch._C.FunctionSchema) -> list[Argument]:
    """The arguments of a schema, in order."""
    return [
        item.name if item.kwarg_only else position for position, item in enumerate(schema.arguments)
    ]
