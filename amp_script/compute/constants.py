"""Tensor constants of a frozen program: widened one at a time, given back when they are needed.

A plan that runs in float32 needs float32 weights, and a file needs the reduced ones. Keeping both
would cost half as much memory again, so a constant that only the plan uses is taken out of the
storable graph, which gets it back, from the plan's own copy and to the bit, when somebody looks at
that graph or saves it.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch

from amp_script.lowering._graph import (
    Editor,
    Graph,
    Node,
    Value,
    constant,
    is_constant,
    is_tensor,
    is_tensor_list,
    nodes_of,
)

from .dtypes import cast_dtype

__all__ = ["Stored", "StoredConstants", "fold_casts"]

Key: TypeAlias = "tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]"
"""What tells a constant from all others that are alive: address, dtype, sizes and strides."""


@dataclass(frozen=True)
class _Place:
    """Where a storable graph holds a tensor: a constant, or one item of a constant list."""

    node: Node
    index: int | None

    def put(self, tensor: torch.Tensor) -> None:
        if self.index is None:
            self.node.t_("value", tensor)
        else:
            tensors = constant(self.node.output())
            tensors[self.index] = tensor
            self.node.ival_("value", tensors)


@dataclass
class Stored:
    """One constant that was taken out of the storable graphs.

    Attributes:
        dtype: the dtype that it had there.
        recover: returns it in float32, to the bit.
    """

    dtype: torch.dtype
    recover: Callable[[], torch.Tensor]


class StoredConstants:
    """The tensor constants of the storable graphs, some of them taken out.

    Args:
        graphs: live graphs of a module's methods. They must not run while a constant is out.
    """

    def __init__(self, graphs: Iterable[Graph]) -> None:
        self._places: dict[Key, list[_Place]] = defaultdict(list)
        self._taken: list[tuple[Stored, list[_Place]]] = []
        self._borrowers = 0
        self._lock = threading.RLock()
        for graph in graphs:
            for node in nodes_of(graph):
                for index, tensor in _tensors(node):
                    self._places[_key(tensor)].append(_Place(node, index))

    def take_out(self, key: Key, stored: Stored) -> None:
        """Empty the places of a constant, so that its memory can be freed."""
        places = self._places[key]
        self._taken.append((stored, places))
        _fill(places, torch.empty(0, dtype=stored.dtype))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every place is full inside the block."""
        with self._lock:
            self._borrowers += 1
            if self._borrowers == 1:
                for stored, places in self._taken:
                    _fill(places, stored.recover().to(stored.dtype))
        try:
            yield
        finally:
            with self._lock:
                self._borrowers -= 1
                if self._borrowers == 0:
                    for stored, places in self._taken:
                        _fill(places, torch.empty(0, dtype=stored.dtype))

    def give_back(self) -> None:
        """Fill every place for good."""
        with self._lock, self.whole():
            self._taken.clear()


def _fill(places: Iterable[_Place], tensor: torch.Tensor) -> None:
    for place in places:
        place.put(tensor)


def fold_casts(graphs: Sequence[Graph], storable: StoredConstants | None) -> dict[int, Stored]:
    """Replace casts of constants to float32 by constants, one constant at a time.

    Args:
        graphs: the plan's graphs, changed in place.
        storable: the constants of the storable graphs, from which those that only the plan uses
            are taken out; ``None`` leaves the storable graphs alone.

    Returns:
        What was taken out, by the address of the float32 constant that took its place.
    """
    editors = [Editor(graph) for graph in graphs]
    casts, kept = _find_casts(editors)
    taken: dict[int, Stored] = {}
    for key, nodes in casts.items():
        tensor = constant(nodes[0][1].inputsAt(0)).to(torch.float32)
        for editor, node in nodes:
            _replace_by_constant(editor, node, tensor)
        if storable is not None and key not in kept:
            stored = Stored(key[1], _recovery(tensor))
            storable.take_out(key, stored)
            taken[tensor.data_ptr()] = stored
    return taken


def _recovery(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


_Casts: TypeAlias = "dict[Key, list[tuple[Editor, Node]]]"


def _find_casts(editors: Sequence[Editor]) -> tuple[_Casts, set[Key]]:
    """Casts of constants to float32, and the constants that have another use too."""
    casts: _Casts = defaultdict(list)
    kept: set[Key] = set()
    for editor in editors:
        for node in nodes_of(editor.graph):
            for _, tensor in _tensors(node):
                key = _key(tensor)
                for use in node.output().uses():
                    if cast_dtype(use.user) is torch.float32 and tensor.numel() > 0:
                        casts[key].append((editor, use.user))
                    else:
                        kept.add(key)
    return casts, kept


def _replace_by_constant(editor: Editor, node: Node, tensor: torch.Tensor) -> None:
    source = node.inputsAt(0)
    value = editor.constant_before(node, tensor)
    node.output().replaceAllUsesWith(value)
    node.destroy()
    if not source.uses():
        source.node().destroy()


def _tensors(node: Node) -> list[tuple[int | None, torch.Tensor]]:
    if node.kind() != "prim::Constant":
        return []
    value: Value = node.output()
    if is_tensor(value) and is_constant(value):
        held = constant(value)
        return [(None, held)] if isinstance(held, torch.Tensor) else []
    return list(enumerate(constant(value))) if is_tensor_list(value) else []


def _key(tensor: torch.Tensor) -> Key:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
