"""A module's tensors as constants of a traced graph, and constants that are a program's own.

Freezing turns parameters into constants, and folds the casts of those constants, in one step. Some
passes need the step between: weights that are constants and not yet rounded. And freezing shares
memory with the model: a frozen program would follow the model's further training, in part.

Private names used here, present in torch 2.6 to 2.15: the C++ module's ``getattr``,
``torch.utils._pytree``'s ``tree_leaves`` and ``tree_map``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map

from amp_script.lowering._graph import (
    Editor,
    Graph,
    Node,
    compiled_graph,
    constant,
    is_constant,
    is_tensor,
    nodes_of,
)

CppModule: TypeAlias = Any
"""A ``torch._C.ScriptModule``, most of whose methods torch's stubs lack."""

__all__ = ["attach_weights", "copy_returned_constants", "own_constants", "share_constants"]


def attach_weights(graph: Graph, module: CppModule, changing: Collection[torch.Tensor]) -> None:
    """Replace what a graph reads of its module's tensors by constants.

    Args:
        graph: graph of a method of ``module``, calls inlined; changed in place. The constants share
            memory with the module's tensors.
        module: what the graph's first input is.
        changing: tensors that the program itself changes; they stay attributes.
    """
    excepted = {id(tensor) for tensor in changing}
    editor = Editor(graph)
    written = {_place(node) for node in nodes_of(graph) if node.kind() == "prim::SetAttr"}
    for node in nodes_of(graph):
        if node.kind() != "prim::GetAttr" or node.output().type().kind() != "TensorType":
            continue
        if _place(node) in written:
            continue
        tensor = _attribute(node, module)
        if isinstance(tensor, torch.Tensor) and id(tensor) not in excepted:
            value = editor.shared_constant(id(tensor), tensor.detach())
            node.output().replaceAllUsesWith(value)
            node.destroy()


def own_constants(graph: Graph, foreign: Iterable[torch.Tensor]) -> None:
    """Copy what shares memory with one of the ``foreign`` tensors in each constant: in a tensor, or
    in a list such as that of an LSTM's weights.
    """
    storages = {tensor.untyped_storage().data_ptr() for tensor in foreign}
    editor = Editor(graph)

    def is_foreign(value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in storages

    for node in nodes_of(graph):
        if node.kind() != "prim::Constant":
            continue
        value = constant(node.output())
        if any(map(is_foreign, tree_leaves(value))):
            owned = tree_map(lambda part: part.clone() if is_foreign(part) else part, value)
            node.output().replaceAllUsesWith(editor.constant_before(node, owned))
            node.destroy()


def share_constants(graph: Graph) -> None:
    """Let constants that hold the same bytes in memory hold them once, also as other views.

    A weight and its transpose, of which two paths of a program each take one, were rounded apart.
    """
    held: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
    editor = Editor(graph)
    aliases: Any = graph.alias_db()
    written = {
        node.output().debugName()
        for node in graph.findAllNodes("prim::Constant")
        if aliases.has_writers(node.output())
    }
    for node in nodes_of(graph):
        value = constant(node.output()) if node.kind() == "prim::Constant" else None
        if not isinstance(value, torch.Tensor) or node.output().debugName() in written:
            continue
        if not _fills_its_memory(value):
            continue
        memory = value.as_strided((value.numel(),), (1,))
        alike = held.setdefault((value.dtype, value.numel()), [])
        same = next((other for other in alike if _same_bytes(memory, other)), None)
        if same is None:
            alike.append(memory)
        elif same.data_ptr() != memory.data_ptr():
            view = same.as_strided(value.shape, value.stride())
            node.output().replaceAllUsesWith(editor.constant_before(node, view))
            node.destroy()


_COPY: Final = """
def copy(constant: Tensor) -> Tensor:
    return torch.ops.aten._to_copy(constant, non_blocking=torch.is_grad_enabled())
"""
"""A copy that is made in each call: of a clone the executor makes a constant, and so of all that
has constant arguments. That one does not block means nothing where it stays on its device."""


def copy_returned_constants(graph: Graph) -> None:
    """Return a copy of each constant, and of each view of one, as eager mode returns new tensors.

    What a caller then does to a result, neither the program nor another result sees.
    """
    editor = Editor(graph)
    _take_apart_returned(editor, graph.return_node())
    aliases: Any = graph.alias_db()
    constants = [
        node.output()
        for node in nodes_of(graph)
        if node.kind() == "prim::Constant" and _is_strided(constant(node.output()))
    ]
    for holder, index in _returned(graph.return_node()):
        value = holder.inputsAt(index)
        if any(aliases.may_contain_alias(value, each) for each in constants):
            (copied,) = editor.graph_before(holder, _copy(), [value])
            holder.replaceInput(index, copied)


@cache
def _copy() -> Graph:
    return compiled_graph(_COPY, {"torch": torch})


def _take_apart_returned(editor: Editor, holder: Node) -> None:
    """Write what returned containers hold as constants of their own, not as one that holds all."""
    for index, value in enumerate(holder.inputs()):
        held = constant(value) if is_constant(value) else None
        if isinstance(held, (list, tuple)) and _holds_tensors(held):
            kind = "prim::ListConstruct" if isinstance(held, list) else "prim::TupleConstruct"
            parts = [editor.constant_before(holder, part) for part in held]
            made = editor.node_before(holder, kind, *parts).output()
            made.setType(value.type())
            holder.replaceInput(index, made)
            value = made
        if value.node().kind().endswith("Construct"):
            _take_apart_returned(editor, value.node())


def _holds_tensors(held: object) -> bool:
    return any(isinstance(part, torch.Tensor) for part in tree_leaves(held))


def _is_strided(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _returned(holder: Node) -> Iterator[tuple[Node, int]]:
    """The tensors that a graph returns, in containers too, as inputs of nodes that hold them."""
    for index, value in enumerate(holder.inputs()):
        if is_tensor(value):
            yield holder, index
        elif value.node().kind().endswith("Construct"):
            yield from _returned(value.node())


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return False
    storage = tensor.untyped_storage()
    return tensor.storage_offset() == 0 and storage.nbytes() == tensor.nbytes


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _place(node: Node) -> tuple[str, str]:
    """Type of the module and name of the attribute that a node reads or writes."""
    return str(node.inputsAt(0).type().annotation_str), str(node.s("name"))


def _attribute(node: Node, module: CppModule) -> object:
    owner = node.input().node()
    holder: CppModule = _attribute(owner, module) if owner.kind() == "prim::GetAttr" else module
    return holder.getattr(node.s("name"))
