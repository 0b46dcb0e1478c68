"""Reading and changing TorchScript graphs: the only module of the passes that knows the raw API.

Passes say *what* a program should do as a few lines of TorchScript (:func:`compiled_function`),
which keeps them readable and typed, and insert calls of it.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.Graph``, ``Node``, ``Value``,
``Block`` and their methods; ``torch._C.CompilationUnit``; the ``torch._C._jit_pass_*`` functions
named in :mod:`amp_script.lowering.cleanup`.
"""

from __future__ import annotations

import builtins
import linecache
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

Node = torch._C.Node
Value = torch._C.Value
Block = torch._C.Block
Function: TypeAlias = "torch._C.ScriptFunction[..., Any]"
if TYPE_CHECKING:
    # Torch's stubs know a few of a graph's methods, and take a type of TorchScript's for four
    # unrelated ones.
    Graph: TypeAlias = Any
    Type: TypeAlias = Any
else:
    Graph = torch._C.Graph
    Type = torch._C.Type

_C: Any = torch._C
"""For what torch's stubs leave out or describe wrongly."""


@cache
def dtype_code(dtype: torch.dtype) -> int:
    """The number by which TorchScript knows a dtype."""
    graph = _C.Graph()
    code = graph.insertConstant(dtype).toIValue()
    assert isinstance(code, int)
    return code


@lru_cache(maxsize=1)
def dtypes_by_code() -> dict[int, torch.dtype]:
    """Every dtype of the installed torch by its number."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype_code(dtype): dtype for dtype in dtypes}


def is_constant(value: Value) -> bool:
    """Whether the value is a constant in the graph (the constant None included)."""
    return bool(value.node().kind() == "prim::Constant")


def constant(value: Value) -> Any:
    """The Python value of a constant."""
    return value.toIValue()


def is_none(value: Value) -> bool:
    """Whether the value is surely None."""
    return bool(value.type().kind() == "NoneType")


def is_tensor(value: Value) -> bool:
    """Whether the value is typed as a tensor, and not as an optional one."""
    return bool(value.type().kind() == "TensorType")


def is_optional_tensor(value: Value) -> bool:
    """Whether the value is typed ``Optional[Tensor]``."""
    kind = value.type()
    return bool(kind.kind() == "OptionalType" and kind.getElementType().kind() == "TensorType")


def is_tensor_list(value: Value) -> bool:
    """Whether the value is typed ``List[Tensor]``."""
    kind = value.type()
    return bool(kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType")


@cache
def parsed_schema(schema: str) -> torch._C.FunctionSchema | None:
    """The schema of a node from its text; None for a node that has none."""
    return None if schema == "(no schema)" else torch._C.parse_schema(schema)


def cast_cache_type() -> Type:
    """``Dict[Tensor, Tensor]``, whose keys are told apart by identity."""
    tensor = torch._C.TensorType.get()
    return torch._C.DictType(tensor, tensor)


def blocks_of(graph: Graph) -> Iterator[Block]:
    """The graph's own block and every block inside it, outer ones first."""
    pending = [graph.block()]
    while pending:
        block = pending.pop()
        yield block
        for node in block.nodes():
            pending.extend(node.blocks())


def nodes_of(graph: Graph) -> list[Node]:
    """Every node, in any block."""
    return [node for block in blocks_of(graph) for node in block.nodes()]


def all_values(graph: Graph) -> Iterator[Value]:
    """Every value that a node or a block of the graph makes, but constants."""
    for block in blocks_of(graph):
        yield from block.inputs()
        for node in block.nodes():
            if node.kind() != "prim::Constant":
                yield from node.outputs()


_CONTAINERS: dict[str, Callable[[list[Type]], Type]] = {
    "ListType": lambda parts: torch._C.ListType(parts[0]),
    "OptionalType": lambda parts: torch._C.OptionalType(parts[0]),
    "TupleType": lambda parts: torch._C.TupleType(parts),
    "DictType": lambda parts: torch._C.DictType(parts[0], parts[1]),
}


def retyped(kind: Type, instead_of: Callable[[Type], Type | None]) -> Type | None:
    """A type with others in the place of some of its parts; None if there are no such parts.

    Args:
        kind: the type.
        instead_of: what is to take the place of a type, or None.
    """
    instead = instead_of(kind)
    if instead is not None or kind.kind() not in _CONTAINERS:
        return instead
    inner = kind.containedTypes()
    replaced = [retyped(part, instead_of) for part in inner]
    if not any(replaced):
        return None
    parts = [new or old for new, old in zip(replaced, inner, strict=True)]
    return _CONTAINERS[kind.kind()](parts)


_RANGE = re.compile(
    r'File "(?P<file>.+)", line (?P<line>\d+)|^(?P<traced>.+)\((?P<at>\d+)\): ', re.M
)
"""A place as TorchScript's compiler writes it, or as its tracer does, with the whole stack."""

_PACKAGE = Path(__file__).parents[1]


@cache
def _is_own(file: str) -> bool:
    """Whether a file is this library's, wherever the library was when the program was made."""
    _, found, inside = file.replace("\\", "/").rpartition(f"/{_PACKAGE.name}/")
    return bool(found) and (_PACKAGE / inside).is_file()


def source_of(node: Node) -> str:
    """The user's source line as ``file:line: text``, or ``""`` where TorchScript kept none."""
    file, line = next(places_of(node), ("", 0))
    return source_line(file, line) if file else ""


def places_of(node: Node) -> Iterator[tuple[str, int]]:
    """Files and lines that led to a node, the innermost first, this library's own left out."""
    for found in _RANGE.finditer(str(node.sourceRange())):
        file = found["file"] or found["traced"]
        if not _is_own(file):
            yield file, int(found["line"] or found["at"])


def source_line(file: str, line: int) -> str:
    """A line of source as ``file:line: text``, without the text where the file is not here."""
    text = linecache.getline(file, line).strip()
    return f"{file}:{line}: {text}" if text else f"{file}:{line}"


_unit = torch._C.CompilationUnit()
"""Where made functions live as long as the process: graphs refer to them and do not keep them."""


def compiled_function(qualified_name: str, source: str, names: Mapping[str, object]) -> Function:
    """Compile one function, given as text.

    Args:
        qualified_name: under which a saved file keeps it, such as ``"__torch__.package.name"``;
            each name once.
        source: the text of the function, in TorchScript.
        names: what the text refers to.
    """
    return create_function(qualified_name, compiled_graph(source, names))


def create_function(qualified_name: str, graph: Graph) -> Function:
    """Make a function of a graph, under a name that no other has."""
    return _unit.create_function(qualified_name, graph)


def made_function(qualified_name: str) -> Function | None:
    """What :func:`create_function` or :func:`compiled_function` made under a name, if anything."""
    return _unit.find_function(qualified_name)


def compiled_graph(source: str, names: Mapping[str, object]) -> Graph:
    """Compile one function, given as text, and return its graph.

    Args:
        source: the text of the function, in TorchScript.
        names: what the text refers to.
    """
    draft = _C.CompilationUnit()
    draft.define(source, {**vars(builtins), **names}.get)
    (function,) = draft.get_functions()
    graph: Graph = function.graph
    return graph


class Editor:
    """Inserts into one graph.

    Args:
        graph: the graph to change.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._constants: dict[object, Value] = {}
        self._functions: dict[str, Value] = {}

    def call_before(self, node: Node, function: Function, *inputs: Value) -> Value:
        """Insert a call of a compiled function before ``node``, and return what it returns."""
        schema: Any = function.schema
        (result,) = schema.returns
        call = self.node_before(node, "prim::CallFunction", self._function(function), *inputs)
        call.copyMetadata(node)
        call.output().setType(result.type)
        return call.output()

    def _function(self, function: Function) -> Value:
        """The constant at the top of the graph that stands for a function."""
        name = function.qualified_name
        if name not in self._functions:
            made = self.node_before(self.first(), "prim::Constant")
            made.s_("name", str(function.name))
            made.output().setType(torch._C._jit_try_infer_type(function).type())
            self._functions[name] = made.output()
        return self._functions[name]

    def graph_before(self, node: Node, callee: Graph, inputs: Sequence[Value]) -> list[Value]:
        """Copy the body of a graph to before ``node`` and return what it returns."""
        with self._at(node):
            outputs: list[Value] = self.graph.insertGraph(callee, list(inputs))
        return outputs

    def graph_after(self, node: Node, callee: Graph) -> None:
        """Copy the body of a graph without inputs to after ``node``."""
        marker = self.node_before(node, "prim::Constant")
        marker.moveAfter(node)
        self.graph_before(marker, callee, ())
        marker.destroy()

    def node_before(self, node: Node, kind: str, *inputs: Value, outputs: int = 1) -> Node:
        """Insert a node of the given kind, whose output types are the caller's to set."""
        with self._at(node):
            made: Node = self.graph.insertNode(self.graph.create(kind, list(inputs), outputs))
        return made

    def constant_before(self, node: Node, value: object) -> Value:
        """Insert a constant of any type TorchScript infers from the Python value."""
        with self._at(node):
            made: Value = self.graph.insertConstant(value)
        return made

    def value_before(self, node: Node, known: object) -> Value:
        """A value for something that may be known: itself if it is one, else a constant."""
        return known if isinstance(known, Value) else self.constant_before(node, known)

    def list_before(self, node: Node, element: Type, values: Sequence[Value]) -> Value:
        """Insert the construction of a list."""
        made = self.node_before(node, "prim::ListConstruct", *values).output()
        made.setType(torch._C.ListType(element))
        return made

    def first(self) -> Node:
        """The node to insert before to be at the top of the graph."""
        node: Node = next(self.graph.nodes(), self.graph.return_node())
        return node

    def add_input(self, name: str, kind: Type) -> Value:
        """Give the graph another input."""
        value: Value = self.graph.addInput(name)
        value.setType(kind)
        return value

    def cast_cache_before(self, node: Node) -> Value:
        """Insert the construction of an empty ``Dict[Tensor, Tensor]``."""
        made = self.node_before(node, "prim::DictConstruct").output()
        made.setType(cast_cache_type())
        return made

    @contextmanager
    def _at(self, node: Node) -> Iterator[None]:
        """Insert before ``node``; a later pass aborts if the insert point is a dead node."""
        self.graph.setInsertPoint(node)
        yield
        self.graph.setInsertPoint(self.graph.block())

    def shared_constant(self, key: object, value: object) -> Value:
        """A constant at the top of the graph, inserted once for each hashable ``key``."""
        if key not in self._constants:
            self._constants[key] = self.constant_before(self.first(), value)
        return self._constants[key]
