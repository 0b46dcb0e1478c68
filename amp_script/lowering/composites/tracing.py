"""Taking composites apart in a trace.

Tracing records operators below autocast: the casts of an operator that autocast knows are nodes of
the trace, and such an operator needs nothing more. A composite is recorded as one node, and what
autocast did inside it is lost. Here each such node is marked, while the trace runs, with the state
that autocast was in, and afterwards its lowered body is put in its place. The body holds loops and
branches where the kernel has them, so nothing that it decides is held fast.

An operator under another name, such as ``linalg.matmul``, is recorded as one node too, which torch
gives the usual name when the trace is complete. It has no casts then, and gets them here.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._get_tracing_state`` and its
``graph``; ``Node.i_``, ``removeAttribute``; ``TensorType.device``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final

import torch

from ... import policy
from ...jit_state import AmbientState
from .expand import body_of, keep_source
from .registry import decomposition, may_be_composite, nodes_of, operator_of

__all__ = ["OTHER_NAMES", "trace_composites"]

OTHER_NAMES: Final = frozenset(
    {
        "aten::arccos",
        "aten::arcsin",
        "aten::arctan2",
        "aten::linalg_matmul",
        "aten::special_erfinv",
        "aten::special_expm1",
        "aten::special_log1p",
        "aten::special_log_softmax",
        "aten::special_logsumexp",
        "aten::special_softmax",
    }
)
"""Names of operators that autocast knows by another, which it casts inside of the call."""

_Graph = Any  # torch types no more than a part of its methods


@contextmanager
def trace_composites() -> Iterator[Callable[[], None]]:
    """Take composites apart in the trace that is made inside.

    One trace, on the calling thread; its graph must not have run when the context is left. What
    ran while tracing was eager autocast itself, and the graph then holds every cast of it.

    Yields:
        A function to call last in what is traced, while operators have the names that they were
        called by.
    """
    watched = _Watched(AmbientState.current())
    outer = sys.getprofile()

    def watch(frame: FrameType, event: Any, argument: object) -> None:
        watched.look()
        if outer is not None:
            outer(frame, event, argument)

    sys.setprofile(watch)
    try:
        yield watched.mark
    finally:
        sys.setprofile(outer)
    watched.look()
    watched.take_apart()


@dataclass
class _Watched:
    """The graph being traced, and the states in which its nodes were recorded.

    Python calls something before and after each change of autocast's state, so that looking at
    every call and return finds the state in which a node was recorded, without standing between
    the traced code and torch, which changes what some of it does.
    """

    state: AmbientState
    graph: torch._C.Graph | None = None
    states: list[AmbientState] = field(default_factory=list)

    def look(self) -> None:
        """Notice the graph, and mark what was recorded before a change of state."""
        if self.graph is None:
            tracing = torch._C._get_tracing_state()
            self.graph = None if tracing is None else tracing.graph()
        state = AmbientState.current()
        if state is not self.state and state != self.state:
            self.mark()
            self.state = state

    def take_apart(self) -> None:
        """Put lowered bodies in the place of what was recorded whole."""
        if self.graph is None:
            return
        self.mark()
        for node in list(nodes_of(self.graph)):
            if node.hasAttribute("other_name"):
                state = self.states[node.i("other_name")]
                node.removeAttribute("other_name")
                _cast(self.graph, node, _where_it_ran(node, state))
            elif node.hasAttribute("autocast"):
                state = self.states[node.i("autocast")]
                node.removeAttribute("autocast")
                if state.any_enabled:
                    _take_apart(self.graph, node, state)

    def mark(self) -> None:
        """Mark what was recorded since the last change of state."""
        if self.graph is None:
            return
        if self.state not in self.states:
            self.states.append(self.state)
        index = self.states.index(self.state)
        for node in nodes_of(self.graph):
            if may_be_composite(node.kind()) and not node.hasAttribute("autocast"):
                node.i_("autocast", index)
            if node.kind() in OTHER_NAMES and not node.hasAttribute("other_name"):
                node.i_("other_name", index)


def _take_apart(graph: _Graph, node: torch._C.Node, state: AmbientState) -> None:
    """Replace an operator that did more in the state than it does as it stands."""
    operator = operator_of(node)
    composite = decomposition(operator)
    state = _where_it_ran(node, state)
    device_types = frozenset(name for name, each in state.devices if each.enabled)
    # What autocast knows itself is in the trace, with its casts.
    if composite is None or any(policy.is_listed(name, operator) for name in device_types):
        return
    if not any(map(composite.reaches, device_types)):
        return
    kept, inputs = body_of(node, device_types)
    body = kept.copy()
    _lower(body, state)
    before = node.prev()
    with graph.insert_point_guard(node):
        results = graph.insertGraph(body, inputs)
    for old, new in zip(node.outputs(), results, strict=True):
        old.replaceAllUsesWith(new)
    keep_source(before, node)
    node.destroy()


def _cast(graph: _Graph, node: torch._C.Node, state: AmbientState) -> None:
    """Give an operator the casts that autocast makes for it in the state."""
    if not state.any_enabled:
        return
    body: _Graph = torch._C.Graph()
    inputs = {
        value: body.addInput().setType(value.type()) for value in dict.fromkeys(node.inputs())
    }
    made = body.insertNode(body.createClone(node, inputs.__getitem__))
    body.registerOutput(made.output())
    _lower(body, state)
    before = node.prev()
    with graph.insert_point_guard(node):
        (result,) = graph.insertGraph(body, list(inputs))
    node.output().replaceAllUsesWith(result)
    keep_source(before, node)
    node.destroy()


def _lower(graph: torch._C.Graph, state: AmbientState) -> None:
    # Not at the top: the passes around this package import it.
    from .. import lower_graph

    lower_graph(graph, state)


def _where_it_ran(node: torch._C.Node, state: AmbientState) -> AmbientState:
    """The state without the devices that the operator's tensors are not on, as the trace knows."""
    device_types = set()
    for value in [*node.inputs(), *node.outputs()]:
        is_list = value.type().kind() == "ListType"
        for part in value.node().inputs() if is_list else [value]:
            kind: Any = part.type()
            if kind.kind() == "TensorType" and kind.device() is not None:
                device_types.add(kind.device().type)
    if not device_types:
        return state
    devices = tuple(
        (name, each if name in device_types else replace(each, enabled=False))
        for name, each in state.devices
    )
    return replace(state, devices=devices)
