"""Which operators are taken apart, and by which function.

A decomposition is a TorchScript function with the parameters of the operator, in order. It calls
what the operator's own kernel calls, down to the next operators that autocast may know: those are
cast, or taken apart in turn, by the passes that read the graph afterwards. Where it calls the
operator itself, it means the operator as it is, with nothing cast inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from ... import policy
from ...jit_state import jit_autocast_pass, shield

__all__ = ["Decomposition", "decomposes", "decomposition", "decompositions", "may_be_composite"]

_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True)
class Decomposition:
    """An operator and the TorchScript function that does what its kernel does.

    Attributes:
        operator: qualified name with overload, such as ``"aten::linalg_norm.ord_str"``.
        function: the function, not compiled yet; it takes the operator's arguments by position.
    """

    operator: str
    function: Callable[..., object]

    def graph(self) -> torch._C.Graph:
        """The function as a graph without calls, ready to be inserted; the caller's to change."""
        graph: torch._C.Graph = _compiled(self.function).copy()
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


_TABLE: dict[str, Decomposition] = {}
_NAMES: set[str] = set()


def decomposes(
    *operators: str, when: Callable[[], bool] = lambda: True
) -> Callable[[_Function], _Function]:
    """Register a function as the decomposition of operators with the same parameters.

    Args:
        operators: qualified names with overload.
        when: asked once, on import: whether the installed torch's kernel works this way.
    """

    def register(function: _Function) -> _Function:
        if when():
            for operator in operators:
                assert operator not in _TABLE, f"{operator} is decomposed twice"
                _TABLE[operator] = Decomposition(operator, function)
                _NAMES.add(operator.partition(".")[0])
        return function

    return register


def decomposition(operator: str) -> Decomposition | None:
    """The decomposition of an operator, by qualified name with overload."""
    return _TABLE.get(operator)


def decompositions() -> tuple[Decomposition, ...]:
    """Every registered decomposition, sorted by operator."""
    return tuple(_TABLE[operator] for operator in sorted(_TABLE))


def may_be_composite(name: str) -> bool:
    """Whether some overload of a qualified name has a decomposition: a quick first question."""
    return name in _NAMES


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
        graph: torch._C.Graph = torch.jit.script(function).graph.copy()
        torch._C._jit_pass_inline(graph)
        return graph


@functools.cache
def _operators(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(
        operator_of(node) for node in nodes_of(_compiled(function)) if node.kind()[:6] == "aten::"
    )
