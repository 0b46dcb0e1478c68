"""Taking composites apart in a trace.

Tracing records operators below autocast: the casts of an operator that autocast knows are nodes of
the trace, and such an operator needs nothing more. A composite is recorded as one node, and what
autocast did inside it is lost; so is what it did in a scripted function or module that the traced
code calls, which is recorded as one call. Here each such node is marked, while the trace runs, with
the state that autocast was in, and afterwards its lowered body is put in its place. The body holds
loops and branches where the kernel has them, so nothing that it decides is held fast.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._get_tracing_state`` and its
``graph``; ``Node.s_``, ``removeAttribute``; ``TensorType.device``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType

import torch

from ... import policy
from ...jit_state import AmbientState
from .expand import body_of, keep_source
from .registry import decomposition, may_be_composite, nodes_of, operator_of

__all__ = ["trace_composites"]

_CALLS = ("prim::CallFunction", "prim::CallMethod")


@contextmanager
def trace_composites() -> Iterator[None]:
    """Take composites, and calls of scripted code, apart in the trace that is made inside.

    One trace, on the calling thread; its graph must not have run when the context is left. What
    ran while tracing was eager autocast itself, and the graph then holds every cast of it.

    Raises:
        LoweringError: scripted code that the trace calls cannot be lowered exactly.
    """
    watched = _Watched(AmbientState.current())
    outer = sys.getprofile()

    def watch(frame: FrameType, event: str, argument: object) -> None:
        watched.look()
        if outer is not None:
            outer(frame, event, argument)

    sys.setprofile(watch)
    try:
        yield
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
            self._mark()
            self.state = state

    def take_apart(self) -> None:
        """Put lowered bodies in the place of what was recorded whole."""
        if self.graph is None:
            return
        self._mark()
        for node in list(nodes_of(self.graph)):
            if node.hasAttribute("autocast"):
                state = self.states[node.i("autocast")]
                node.removeAttribute("autocast")
                body = _body(node, state) if state.any_enabled else None
                if body is not None:
                    _put(self.graph, body, node)

    def _mark(self) -> None:
        if self.graph is None:
            return
        if self.state not in self.states:
            self.states.append(self.state)
        index = self.states.index(self.state)
        for node in nodes_of(self.graph):
            kind = node.kind()
            if (kind in _CALLS or may_be_composite(kind)) and not node.hasAttribute("autocast"):
                node.i_("autocast", index)


def _put(graph: torch._C.Graph, body: torch._C.Graph, node: torch._C.Node) -> None:
    before = node.prev()
    with graph.insert_point_guard(node):
        results = graph.insertGraph(body, list(node.inputs()))
    for old, new in zip(node.outputs(), results, strict=True):
        old.replaceAllUsesWith(new)
    keep_source(before, node)
    node.destroy()


def _body(node: torch._C.Node, state: AmbientState) -> torch._C.Graph | None:
    """What the node did in the state, or None where it did what it does as it stands."""
    if node.kind() in _CALLS:
        return _called(node, state)
    composite = decomposition(operator_of(node))
    if composite is None:
        return None
    state = _where_it_ran(node, state)
    device_types = frozenset(name for name, each in state.devices if each.enabled)
    if any(policy.is_listed(name, composite.operator) for name in device_types):
        return None  # autocast knows the operator itself, and its casts are in the trace
    if not any(map(composite.reaches, device_types)):
        return None
    graph = body_of(node, device_types).copy()
    _lower(graph, state)
    return graph


def _called(node: torch._C.Node, state: AmbientState) -> torch._C.Graph:
    graph = torch._C.Graph()
    inputs = {value.unique(): graph.addInput().setTypeAs(value) for value in node.inputs()}
    call = graph.insertNode(graph.createClone(node, lambda value: inputs[value.unique()]))
    for value in call.outputs():
        graph.registerOutput(value)
    _lower(graph, state)
    return graph


def _lower(graph: torch._C.Graph, state: AmbientState) -> None:
    # Not at the top: the passes around this package import it.
    from .. import lower_graph

    lower_graph(graph, state)


def _where_it_ran(node: torch._C.Node, state: AmbientState) -> AmbientState:
    """The state without the devices that the operator's tensors are not on, as the trace knows."""
    device_types = set()
    for value in [*node.inputs(), *node.outputs()]:
        parts = value.node().inputs() if value.type().kind() == "ListType" else [value]
        for part in parts:
            if part.type().kind() == "TensorType" and part.type().device() is not None:
                device_types.add(part.type().device().type)
    if not device_types:
        return state
    devices = tuple(
        (name, each if name in device_types else replace(each, enabled=False))
        for name, each in state.devices
    )
    return replace(state, devices=devices)
