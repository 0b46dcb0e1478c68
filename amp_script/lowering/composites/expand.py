"""The pass that takes composite operators apart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from ... import policy
from ..cleanup import fold
from .registry import (
    VARIES,
    Decomposition,
    Elements,
    Known,
    decomposition,
    may_be_composite,
    nodes_of,
    operator_of,
)

__all__ = ["body_of", "expand_composites", "keep_source"]

# torch types no more than a part of these
_C: Any = torch._C
_Graph = Any


def expand_composites(
    graph: torch._C.Graph, active: Callable[[torch._C.Node], Collection[str]]
) -> None:
    """Replace every composite operator that autocast may reach into, until none is left.

    Runs before the pass that casts, on a graph without calls, in place, nested blocks included.
    The nodes put in for an operator carry its source range, and stand where it stood, so that
    they are in the regions that it was in.

    Args:
        graph: the graph to change.
        active: asked of each node that may be composite: the device types for which autocast may
            be on when it runs. Empty outside every region; the node then stays as it is.
    """
    for node in list(nodes_of(graph)):
        if may_be_composite(node.kind()):
            composite = decomposition(operator_of(node))
            if composite is not None:
                _expand(graph, node, composite, frozenset(active(node)), surely=False)


def body_of(
    node: torch._C.Node, device_types: frozenset[str]
) -> tuple[torch._C.Graph, list[torch._C.Value]]:
    """What to put in the place of a composite operator, taken apart until nothing is left to.

    Args:
        node: the operator, which has a decomposition.
        device_types: what its tensors lie on is one of these.

    Returns:
        A graph with the operator's outputs, in which constants among its inputs, and questions
        for the device, are answered; and the values that it takes: the operator's inputs, then
        the elements of each list that is made for it alone. The graph is kept: copy it to change
        it.
    """
    composite = decomposition(operator_of(node))
    assert composite is not None
    known = list(map(_known, node.inputs()))
    key = (composite.operator, device_types, tuple((type(value), str(value)) for value in known))
    if key not in _bodies:
        _bodies[key] = _body(composite, device_types, known)
    inputs = list(node.inputs())
    for value, what in zip(node.inputs(), known, strict=True):
        if isinstance(what, Elements):
            inputs.extend(value.node().inputs())
    return _bodies[key], inputs


def keep_source(before: torch._C.Node, node: torch._C.Node) -> None:
    """Give the nodes between two nodes, and those in their blocks, the second one's source."""
    new = node
    while (new := new.prev()) != before:
        new.copyMetadata(node)
        for block in new.blocks():
            for inner in nodes_of(block):
                inner.copyMetadata(node)


_bodies: dict[tuple[object, ...], torch._C.Graph] = {}


def _body(composite: Decomposition, device_types: frozenset[str], known: Known) -> torch._C.Graph:
    graph = composite.graph(known)
    _take_elements(graph, known)
    _answer_devices(graph, device_types)
    fold(graph)
    if composite.unroll:
        _C._jit_pass_constant_loop_unrolling(graph)
    _C._jit_pass_lower_all_tuples(graph)
    fold(graph)
    for node in list(nodes_of(graph)):
        inner = decomposition(operator_of(node)) if may_be_composite(node.kind()) else None
        if inner is not None and inner != composite:
            _expand(graph, node, inner, device_types, surely=True)
    return graph


def _expand(
    graph: _Graph,
    node: torch._C.Node,
    composite: Decomposition,
    active: frozenset[str],
    *,
    surely: bool,
) -> None:
    """Take one operator apart for the device types on which autocast reaches into it.

    ``surely``: its tensors lie on one of the active device types. Where they may lie elsewhere,
    or where autocast knows the operator itself, the operator is kept beside its parts.
    """
    listed = {name for name in active if policy.is_listed(name, composite.operator)}
    reached = frozenset(filter(composite.reaches, active - listed))
    if not reached:
        return
    before = node.prev()
    if surely and reached == active:
        with graph.insert_point_guard(node):
            results = graph.insertGraph(*body_of(node, reached))
    else:
        results = _choice(graph, node, reached)
    keep_source(before, node)
    for old, new in zip(node.outputs(), results, strict=True):
        new.setType(old.type())
        old.replaceAllUsesWith(new)
    node.destroy()


def _choice(
    graph: _Graph, node: torch._C.Node, device_types: frozenset[str]
) -> list[torch._C.Value]:
    guard, tensor = _guard(node)
    with graph.insert_point_guard(node):
        inside = graph.insertGraph(guard, [tensor, graph.insertConstant(sorted(device_types))])
        choice = graph.insertNode(graph.create("prim::If", inside, node.outputsSize()))
    parts, whole = choice.addBlock(), choice.addBlock()
    with graph.insert_point_guard(parts):
        for output in graph.insertGraph(*body_of(node, device_types)):
            parts.registerOutput(output)
    with graph.insert_point_guard(whole):
        for output in graph.insertNode(graph.createClone(node, lambda value: value)).outputs():
            whole.registerOutput(output)
    return list(choice.outputs())


def _guard(node: torch._C.Node) -> tuple[torch._C.Graph, torch._C.Value]:
    """A graph that asks whether an operator's first tensor is on a device, and that tensor."""
    for value in node.inputs():
        kind: Any = value.type()
        if kind.kind() == "TensorType":
            return Decomposition("", _is_on).graph(), value
        if kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType":
            return Decomposition("", _is_first_on).graph(), value
    raise AssertionError(f"{node.kind()} takes no tensor")


def _is_on(tensor: torch.Tensor, device_types: list[str]) -> bool:
    return tensor.device.type in device_types


def _is_first_on(tensors: list[torch.Tensor], device_types: list[str]) -> bool:
    return tensors[0].device.type in device_types


def _known(value: torch._C.Value) -> object:
    """What is known of an argument before the program runs."""
    node = value.node()
    if node.kind() == "prim::Constant":
        constant = value.toIValue()
        return constant if isinstance(constant, (int, float, str, type(None))) else VARIES
    if node.kind() == "prim::ListConstruct" and len(value.uses()) == 1:
        parts = list(map(_known, node.inputs()))
        if parts and all(type(part) is int for part in parts):
            return parts
        return Elements(len(parts))
    return VARIES


def _take_elements(graph: _Graph, known: Known) -> None:
    """Let constants stand for themselves, and make lists of their elements, taken as inputs."""
    with graph.insert_point_guard(next(graph.nodes())):
        for value, what in zip(list(graph.inputs()), known, strict=True):
            if isinstance(what, Elements):
                kind = value.type().getElementType()
                elements = [graph.addInput().setType(kind) for _ in range(what.count)]
                made = graph.insertNode(graph.create("prim::ListConstruct", elements)).output()
                value.replaceAllUsesWith(made.setType(value.type()))
            elif what is not VARIES:
                value.replaceAllUsesWith(graph.insertConstant(what))


_ON = {f"prim::is_{name}": name for name in ("cpu", "cuda", "xpu", "mps", "mtia", "maia")}


def _answer_devices(graph: _Graph, device_types: frozenset[str]) -> None:
    for node in list(nodes_of(graph)):
        kind = node.kind()
        answer: object = None
        if kind == "aten::cudnn_is_acceptable" and "cuda" not in device_types:
            answer = False
        elif kind in _ON and (len(device_types) == 1 or _ON[kind] not in device_types):
            answer = _ON[kind] in device_types
        elif kind == "prim::type" and len(device_types) == 1:
            (answer,) = device_types
        if answer is not None:
            with graph.insert_point_guard(node):
                node.output().replaceAllUsesWith(graph.insertConstant(answer))
