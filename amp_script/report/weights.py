"""How many bytes a program's tensors take, by dtype.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ConcreteModuleType``,
``torch._C.ModuleDict``, and of the C++ module ``_type`` and ``getattr``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from amp_script.compute import CppModule
from amp_script.lowering._graph import Graph, constant, nodes_of

from .model import Weights

__all__ = ["constants_of", "state_of", "weigh"]

_C: Any = torch._C  # torch's stubs lack what is used here


def constants_of(graphs: Iterable[Graph]) -> Iterator[torch.Tensor]:
    """The tensors that graphs hold, alone and in containers."""
    for node in (node for graph in graphs for node in nodes_of(graph)):
        if node.kind() == "prim::Constant":
            yield from _tensors(constant(node.output()))
        elif node.kind() == "prim::ConstantMKLDNNTensor":
            yield node.t("value")


def state_of(cpp_module: CppModule) -> Iterator[torch.Tensor]:
    """The tensors that a module and those inside it have as attributes, alone and in containers."""
    for name in _C.ConcreteModuleType.from_jit_type(cpp_module._type()).get_attributes():
        yield from _tensors(cpp_module.getattr(name))
    for _, child in _C.ModuleDict(cpp_module).items():
        yield from state_of(child)


def _tensors(held: object) -> Iterator[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (list, tuple)):
        for item in held:
            yield from _tensors(item)
    elif isinstance(held, dict):
        yield from _tensors([*held.keys(), *held.values()])


def weigh(tensors: Iterable[torch.Tensor]) -> Mapping[torch.dtype, Weights]:
    """Add up memory by dtype, the most first; what shares memory counts once, as a file has it.

    A view counts with all the memory that it looks into.
    """
    seen: dict[object, tuple[torch.dtype, int]] = {}
    for part in (part for tensor in tensors for part in _dense_parts(tensor)):
        key, size = _memory(part)
        seen.setdefault(key, (part.dtype, size))
    totals: dict[torch.dtype, Weights] = {}
    for dtype, size in seen.values():
        before = totals.get(dtype, Weights(0, 0))
        totals[dtype] = Weights(before.tensors + 1, before.size + size)
    return dict(sorted(totals.items(), key=lambda item: -item[1].size))


def _dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse one consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


def _memory(tensor: torch.Tensor) -> tuple[object, int]:
    """What tells a tensor's memory from all other, and its bytes."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    key = (str(tensor.device), storage.data_ptr()) if storage.nbytes() else id(tensor)
    return key, storage.nbytes()
