"""Which operators are taken apart, and by which function.

A decomposition is a TorchScript function with the parameters of the operator, in order. It calls
what the operator's own kernel calls, down to the next operators that autocast may know: those are
cast, or taken apart in turn, by the passes that read the graph afterwards. Where it calls the
operator itself, it means the operator as it is, with nothing cast inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch

from ... import policy
from ...jit_state import jit_autocast_pass, shield
from ...undeprecated import compile_function

__all__ = [
    "VARIES",
    "Decomposition",
    "Elements",
    "Known",
    "compiled_text",
    "decomposes",
    "decomposes_text",
    "decomposition",
    "decompositions",
    "may_be_composite",
    "nodes_of",
    "operator_of",
]

_Function = TypeVar("_Function", bound=Callable[..., object])

VARIES: Final = object()
"""Stands for an argument that is known only when the program runs."""


@dataclass(frozen=True)
class Elements:
    """Stands for a list whose elements vary, but whose length is known."""

    count: int


Known = Sequence[object]
"""An operator's arguments: constants of the program, :class:`Elements` or :data:`VARIES`."""

_ScriptFunction = Any  # generic in newer torch alone
_Special = Callable[[Known], _ScriptFunction | None]


def _never_special(known: Known) -> None:
    return None


@dataclass(frozen=True)
class Decomposition:
    """An operator and the TorchScript function that does what its kernel does.

    Attributes:
        operator: qualified name with overload, such as ``"aten::linalg_norm.ord_str"``.
        function: the function, not compiled yet; it takes the operator's arguments by position.
        special: gives a compiled function that does the same, sooner, for given constants; or None.
        unroll: whether to write out loops whose length is a constant.
    """

    operator: str
    function: Callable[..., object]
    special: _Special = _never_special
    unroll: bool = False

    def graph(self, known: Known = ()) -> torch._C.Graph:
        """The function as a graph without calls, ready to be inserted; the caller's to change."""
        special = self.special(known) if known else None
        graph: torch._C.Graph = (
            _compiled(self.function).copy() if special is None else _without_calls(special)
        )
        return graph

    def reaches(self, device_type: str) -> bool:
        """Whether something inside is autocast on a device type.

        False for what only concatenates: ``cat`` and ``stack`` promote their inputs the same way
        with autocast and without.
        """
        return any(
            _changes(operator, device_type)
            or ((inner := decomposition(operator)) is not None and inner.reaches(device_type))
            for operator in _operators(self.function) - {self.operator}
        )


@dataclass(frozen=True, eq=False)
class _Text:
    source: str
    names: Mapping[str, object]

    def __call__(self, *arguments: object) -> object:
        return compiled_text(self.source, self.names)(*arguments)


_TABLE: dict[str, Decomposition] = {}
_NAMES: set[str] = set()


def decomposes(
    *operators: str,
    when: Callable[[], bool] | None = None,
    special: _Special = _never_special,
    unroll: bool = False,
) -> Callable[[_Function], _Function]:
    """Register a function as the decomposition of operators with the same parameters.

    Operators that the installed torch lacks are left out.

    Args:
        operators: qualified names with overload.
        when: asked once, on import: whether the installed torch's kernel works this way.
        special: see :class:`Decomposition`.
        unroll: see :class:`Decomposition`.
    """

    def register(function: _Function) -> _Function:
        if when is None or when():
            for operator in filter(torch._C._dispatch_has_kernel, operators):
                assert operator not in _TABLE, f"{operator} is decomposed twice"
                _TABLE[operator] = Decomposition(operator, function, special, unroll)
                _NAMES.add(operator.partition(".")[0])
        return function

    return register


def decomposes_text(
    operator: str, source: str, names: Mapping[str, object], *, unroll: bool = False
) -> None:
    """Register a function that is given as text, for families that differ in names alone.

    Args:
        operator: qualified name with overload.
        source: see :func:`compiled_text`.
        names: see :func:`compiled_text`.
        unroll: see :class:`Decomposition`.
    """
    decomposes(operator, unroll=unroll)(_Text(source, names))


def decomposition(operator: str) -> Decomposition | None:
    """The decomposition of an operator, by qualified name with overload."""
    return _TABLE.get(operator)


def decompositions() -> tuple[Decomposition, ...]:
    """Every registered decomposition, sorted by operator."""
    return tuple(_TABLE[operator] for operator in sorted(_TABLE))


def may_be_composite(name: str) -> bool:
    """Whether some overload of a qualified name has a decomposition: a quick first question."""
    return name in _NAMES


def compiled_text(source: str, names: Mapping[str, object]) -> _ScriptFunction:
    """Compile one function that is given as text.

    Args:
        source: TorchScript.
        names: what names in it stand for.
    """
    unit: Any = torch._C.CompilationUnit()
    unit.define(source, names.get)
    (function,) = unit.get_functions()
    return function


def operator_of(node: torch._C.Node) -> str:
    """Qualified name with overload of a node's operator; its kind where it has no schema."""
    text = node.schema()
    return node.kind() if text == "(no schema)" else text.partition("(")[0]


def nodes_of(block: torch._C.Graph | torch._C.Block) -> Iterator[torch._C.Node]:
    """Every node of a block and of the blocks in it, as they stand when each is reached."""
    for node in list(block.nodes()):
        yield node
        for inner in node.blocks():
            yield from nodes_of(inner)


_PROMOTE_ALIKE = frozenset({"aten::cat", "aten::stack"})


def _changes(operator: str, device_type: str) -> bool:
    return operator not in _PROMOTE_ALIKE and policy.is_listed(device_type, operator)


@functools.cache
def _compiled(function: Callable[..., object]) -> torch._C.Graph:
    with jit_autocast_pass(False), shield():
        if isinstance(function, _Text):
            return _without_calls(compiled_text(function.source, function.names))
        return _without_calls(compile_function(function))


def _without_calls(function: _ScriptFunction) -> torch._C.Graph:
    graph: Any = function.graph.copy()
    with jit_autocast_pass(False), shield():
        torch._C._jit_pass_inline(graph)
    (result,) = graph.outputs()
    if result.type().kind() == "TupleType":  # an operator has several outputs instead
        types = result.type().elements()
        unpack = graph.insertNode(graph.create("prim::TupleUnpack", [result], len(types)))
        graph.eraseOutput(0)
        for output, kind in zip(unpack.outputs(), types, strict=True):
            graph.registerOutput(output.setType(kind))
    return graph


@functools.cache
def _operators(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(
        operator_of(node) for node in nodes_of(_compiled(function)) if node.kind()[:6] == "aten::"
    )
