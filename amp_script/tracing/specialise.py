"""Settles what a frozen program asks about its own tensors.

Lowered TorchScript asks each tensor for its dtype and device before it casts. A frozen program
takes inputs of one dtype on one device, so most answers are known: they become constants, branches
fall away, and casts go that were made before or change nothing.

Private names used here, present in torch 2.6 to 2.15: the ``torch._C`` passes
``_jit_pass_constant_propagation``, ``_jit_pass_constant_pooling`` and ``_jit_pass_dce``,
``torch._C.parse_schema``, and a graph's ``alias_db``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import torch

from amp_script.compute.dtypes import Dtypes, cast_dtype, infer
from amp_script.lowering._graph import (
    Block,
    Editor,
    Graph,
    Node,
    Value,
    constant,
    dtype_code,
    is_constant,
    nodes_of,
)

__all__ = ["specialise"]

_C: Any = torch._C  # torch's stubs lack most passes


def specialise(graph: Graph, inputs: Mapping[str, torch.dtype], device_type: str) -> None:
    """Answer a graph's questions about dtypes and devices, as far as they are known.

    Args:
        graph: a frozen graph; changed in place.
        inputs: dtypes of its tensor inputs, by name.
        device_type: device type of the inputs and constants.
    """
    settled_device = None if _names_other_device(graph, device_type) else device_type
    changed = True
    while changed:
        _C._jit_pass_constant_propagation(graph)
        _C._jit_pass_constant_pooling(graph)
        _C._jit_pass_dce(graph)
        changed = _specialise_once(graph, infer(graph, inputs), settled_device)
        changed |= _share_casts(graph.block(), {}, graph.alias_db(), _handed_out(graph))


def _specialise_once(graph: Graph, dtypes: Dtypes, device_type: str | None) -> bool:
    changed = False
    for node in nodes_of(graph):
        changed |= any(rule(graph, node, dtypes, device_type) for rule in _RULES)
    return changed


_Rule = Callable[[Graph, Node, Dtypes, "str | None"], bool]


def _answer_dtype(graph: Graph, node: Node, dtypes: Dtypes, device_type: str | None) -> bool:
    if node.kind() not in ("prim::dtype", "aten::is_floating_point"):
        return False
    dtype = dtypes.of(node.inputsAt(0))
    if dtype is None:
        return False
    asks_code = node.kind() == "prim::dtype"
    return _settle(graph, node, dtype_code(dtype) if asks_code else dtype.is_floating_point)


def _answer_device(graph: Graph, node: Node, dtypes: Dtypes, device_type: str | None) -> bool:
    asked = _DEVICE_QUESTIONS.get(node.kind())
    if asked is None or device_type is None:
        return False
    return _settle(graph, node, asked == device_type)


_DEVICE_QUESTIONS: Final = {
    f"prim::is_{name}": name for name in ("cpu", "cuda", "xpu", "mps", "mtia", "maia", "xla")
}


def _drop_cast(graph: Graph, node: Node, dtypes: Dtypes, device_type: str | None) -> bool:
    """A cast to the dtype that a value has, unless it is asked to copy, is the value itself."""
    dtype = cast_dtype(node)
    copies = dtype is not None and _copies(node)
    if dtype is None or copies or dtypes.of(node.inputsAt(0)) != dtype or not node.hasUses():
        return False
    node.output().replaceAllUsesWith(node.inputsAt(0))
    return True


def _copies(node: Node) -> bool:
    """Whether a cast makes a copy or another layout even where the dtype is the same."""
    names = [argument.name for argument in torch._C.parse_schema(node.schema()).arguments]
    given = dict(zip(names, node.inputs(), strict=False))
    copies, memory_format = given.get("copy"), given.get("memory_format")
    plain = all(
        given[name].type().kind() == "NoneType"
        for name in ("layout", "device", "pin_memory")
        if name in given
    )
    return not (
        plain
        and copies is not None
        and is_constant(copies)
        and not constant(copies)
        and memory_format is not None
        and memory_format.type().kind() == "NoneType"
    )


def _drop_choice(graph: Graph, node: Node, dtypes: Dtypes, device_type: str | None) -> bool:
    """A result that both branches take from before the branch is no choice."""
    if node.kind() != "prim::If":
        return False
    changed = False
    one, other = (list(block.outputs()) for block in node.blocks())
    for output, a, b in zip(node.outputs(), one, other, strict=True):
        if a.unique() == b.unique() and output.uses():
            output.replaceAllUsesWith(a)
            changed = True
    return changed


_RULES: Final[tuple[_Rule, ...]] = (_answer_dtype, _answer_device, _drop_cast, _drop_choice)


def _share_casts(
    block: Block, known: Mapping[_CastKey, Value], aliases: Any, handed_out: set[int]
) -> bool:
    """Make each cast that was made before, here or in a block around, that cast's result.

    TorchScript's own pass for common expressions does not look into blocks around. What goes out
    stays a tensor of its own.
    """
    changed = False
    casts = dict(known)
    for node in block.nodes():
        for inner in node.blocks():
            changed |= _share_casts(inner, casts, aliases, handed_out)
        if cast_dtype(node) is None or not node.hasUses():
            continue
        if aliases.has_writers(node.inputsAt(0)) or aliases.has_writers(node.output()):
            continue
        key = tuple(value.unique() for value in node.inputs())
        before = casts.setdefault(key, node.output())
        if node.output().unique() not in {before.unique(), *handed_out}:
            node.output().replaceAllUsesWith(before)
            changed = True
    return changed


_CastKey: TypeAlias = "tuple[int, ...]"


def _handed_out(graph: Graph) -> set[int]:
    """Values that the graph returns, or puts into containers."""
    holders = (node for node in nodes_of(graph) if node.kind().endswith("Construct"))
    values = [*graph.outputs(), *(value for node in holders for value in node.inputs())]
    return {value.unique() for value in values}


def _settle(graph: Graph, node: Node, answer: object) -> bool:
    if not node.hasUses():
        return False
    node.output().replaceAllUsesWith(Editor(graph).constant_before(node, answer))
    return True


def _names_other_device(graph: Graph, device_type: str) -> bool:
    """Whether the graph may move tensors to another device."""
    constants = [node.output() for node in nodes_of(graph) if node.kind() == "prim::Constant"]
    devices = [constant(value) for value in constants if value.type().kind() == "DeviceObjType"]
    return any(torch.device(device).type != device_type for device in devices)
