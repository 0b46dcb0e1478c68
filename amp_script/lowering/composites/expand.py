"""The pass that takes composite operators apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch

from ... import policy
from .registry import Decomposition, decomposition, may_be_composite, nodes_of, operator_of

__all__ = ["expand_composites"]


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
            device_types = frozenset(active(node))
            if device_types:
                _expand(graph, node, device_types)


def _expand(graph: torch._C.Graph, node: torch._C.Node, device_types: frozenset[str]) -> None:
    composite = decomposition(operator_of(node))
    if composite is None:
        return
    listed = {name for name in device_types if policy.is_listed(name, composite.operator)}
    if not any(composite.reaches(name) for name in device_types - listed):
        return
    before = node.prev()
    with graph.insert_point_guard(node):
        if listed:
            results = _either(graph, node, sorted(listed), composite, device_types)
        else:
            results = graph.insertGraph(
                _expanded(composite.operator, device_types), list(node.inputs())
            )
    _keep_source(before, node)
    for old, new in zip(node.outputs(), results, strict=True):
        new.setType(old.type())
        old.replaceAllUsesWith(new)
    node.destroy()


@functools.cache
def _expanded(operator: str, device_types: frozenset[str]) -> torch._C.Graph:
    composite = decomposition(operator)
    assert composite is not None
    graph = composite.graph()
    expand_composites(graph, lambda node: () if operator_of(node) == operator else device_types)
    torch._C._jit_pass_dce(graph)
    return graph


def _either(
    graph: Any,  # torch types no more than a part of a graph's methods
    node: torch._C.Node,
    listed: list[str],
    composite: Decomposition,
    device_types: frozenset[str],
) -> list[torch._C.Value]:
    """Keep the operator where autocast knows it itself; take it apart on other devices."""
    tensor = next(value for value in node.inputs() if str(value.type()) == "Tensor")
    (known,) = graph.insertGraph(
        Decomposition("", _is_on).graph(), [tensor, graph.insertConstant(listed)]
    )
    choice = graph.insertNode(graph.create("prim::If", [known], node.outputsSize()))
    whole, parts = choice.addBlock(), choice.addBlock()
    with graph.insert_point_guard(whole):
        kept = graph.insertNode(graph.createClone(node, lambda value: value))
        for output in kept.outputs():
            whole.registerOutput(output)
    with graph.insert_point_guard(parts):
        for output in graph.insertGraph(
            _expanded(composite.operator, device_types), list(node.inputs())
        ):
            parts.registerOutput(output)
    return list(choice.outputs())


def _is_on(tensor: torch.Tensor, device_types: list[str]) -> bool:
    return tensor.device.type in device_types


def _keep_source(before: torch._C.Node, node: torch._C.Node) -> None:
    """Give the nodes between two nodes, and those in their blocks, the second one's source."""
    new = node
    while (new := new.prev()) != before:
        new.copyMetadata(node)
        for block in new.blocks():
            for inner in nodes_of(block):
                inner.copyMetadata(node)
