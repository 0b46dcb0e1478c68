"""Tensor constants of a frozen program: widened one at a time, given back when they are needed.

A plan that runs in float32 needs float32 weights, and a file needs the reduced ones. Keeping both
would cost half as much memory again, so a constant that only the plan uses is taken out of the
storable graph, which gets it back, from the plan's own copy and to the bit, when somebody looks at
that graph or saves it.

Private names used here, present in torch 2.6 to 2.15: the two operators named in ``_PACKERS`` and
``prim::ConstantMKLDNNTensor``.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

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

__all__ = ["PackedWeight", "Stored", "StoredConstants", "fold_casts", "return_free_memory"]

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
        self._taken: list[tuple[Key, Stored, list[_Place]]] = []
        self._borrowers = 0
        self._lock = threading.RLock()
        for graph in graphs:
            for node in nodes_of(graph):
                for index, tensor in _tensors(node):
                    self._places[_key(tensor)].append(_Place(node, index))

    def take_out(self, key: Key, stored: Stored) -> None:
        """Empty the places of a constant, so that its memory can be freed."""
        places = self._places[key]
        self._taken.append((key, stored, places))
        _fill(places, torch.empty(0, dtype=stored.dtype))

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Every place is full inside the block."""
        with self._lock:
            self._borrowers += 1
            if self._borrowers == 1:
                self._recover()
        try:
            yield
        finally:
            with self._lock:
                self._borrowers -= 1
                if self._borrowers == 0:
                    for _, stored, places in self._taken:
                        _fill(places, torch.empty(0, dtype=stored.dtype))

    def _recover(self) -> None:
        """Fill the places; views of one memory, such as a weight and its transpose, share it."""
        recovered: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}
        for (address, dtype, sizes, strides), stored, places in self._taken:
            if not _is_dense(sizes, strides):
                _fill(places, stored.recover().to(dtype))
                continue
            memory = address, dtype, math.prod(sizes)
            if memory not in recovered:
                recovered[memory] = stored.recover().to(dtype)
            _fill(places, recovered[memory].as_strided(sizes, strides))

    def give_back(self) -> None:
        """Fill every place for good."""
        with self._lock, self.whole():
            self._taken.clear()


def _is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return reach + 1 == math.prod(sizes)


def _fill(places: Iterable[_Place], tensor: torch.Tensor) -> None:
    for place in places:
        place.put(tensor)


def fold_casts(
    graphs: Mapping[str, Graph], storable: StoredConstants | None
) -> dict[tuple[str, str], PackedWeight]:
    """Replace casts of constants to float32, and what packs their results, by constants.

    One constant is converted at a time, and its old form freed before the next. Packed weights of
    convolutions are no constants: whoever made the graph take them as inputs passes them.

    Args:
        graphs: the plan's graphs by name, changed in place.
        storable: the constants of the storable graphs, from which those that only the plan uses
            are taken out; ``None`` leaves the storable graphs alone.

    Returns:
        Packed weights of convolutions, by the names of the graph and of the value that packed each.
    """
    editors = {name: Editor(graph) for name, graph in graphs.items()}
    casts, kept = _find_casts(editors)
    workspace = _Workspace()
    packed: dict[tuple[str, str], PackedWeight] = {}
    freed = 0
    for key, places in casts.items():
        forms = _Forms(constant(places[0][1].inputsAt(0)), workspace)
        for name, cast in places:
            weights = forms.replace(editors[name], cast)
            packed |= {(name, packing): weight for packing, weight in weights.items()}
        if storable is not None and key not in kept:
            freed += forms.reduced_bytes
            storable.take_out(key, Stored(key[1], forms.recovery()))
        del forms
        if freed >= _WORTH_RETURNING:
            return_free_memory()
            freed = 0
    return packed


_Casts: TypeAlias = "dict[Key, list[tuple[str, Node]]]"


def _find_casts(editors: Mapping[str, Editor]) -> tuple[_Casts, set[Key]]:
    """Casts of constants to float32, and the constants that have another use too."""
    casts: _Casts = defaultdict(list)
    kept: set[Key] = set()
    for name, editor in editors.items():
        for node in nodes_of(editor.graph):
            for _, tensor in _tensors(node):
                key = _key(tensor)
                for use in node.output().uses():
                    if cast_dtype(use.user) is torch.float32 and tensor.numel() > 0:
                        casts[key].append((name, use.user))
                    else:
                        kept.add(key)
    return casts, kept


_WORTH_RETURNING: Final = 4 << 20
"""Bytes freed from which the system's allocator is asked to give pages back."""


def return_free_memory() -> None:
    """Have the system's allocator give back pages that it keeps for later, where it can.

    Freed constants leave holes between live ones, too small for the wider ones that follow; glibc
    keeps their pages unless it is asked.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


class _Workspace:
    """Memory for the plain form of constants that are only packed.

    Allocating and freeing each would leave holes between the packed ones, which the system's
    allocator cannot fill with the next.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32)

    def widen(self, reduced: torch.Tensor) -> torch.Tensor:
        """The tensor in float32, until the next call."""
        if self._memory.numel() < reduced.numel():
            self._memory = torch.empty(reduced.numel(), dtype=torch.float32)
        return self._memory[: reduced.numel()].view(reduced.shape).copy_(reduced)


class Form(NamedTuple):
    """A weight in some layout, with what that suits; replaced as one, so that calls in other
    threads never see the one without the other.

    Attributes:
        tensor: packed or plain, in float32.
        sizes: of a convolution's input; none while the weight is plain.
        threads: their number.
    """

    tensor: torch.Tensor
    sizes: list[int]
    threads: int


class PackedWeight:
    """A weight in the layout that a oneDNN kernel reads, and nowhere else.

    Args:
        plain: the weight in float32; it is not kept.
        stride: the layout that it has in the storable graph.
        packer: kind of the node that packs it.
        arguments: what the node takes after the weight; last, for a convolution, the sizes of its
            input.
        transposed: whether the node packs the weight's transpose.

    Attributes:
        form: the weight as the kernel takes it, and what it suits.
    """

    def __init__(
        self,
        plain: torch.Tensor,
        stride: Sequence[int],
        packer: str,
        arguments: Sequence[Any],
        *,
        transposed: bool = False,
    ) -> None:
        self._stride = stride
        self._transposed = transposed
        self._pack = _PACKERS[packer]
        *self._options, suits = arguments
        sizes = list(suits) if isinstance(suits, Sequence) else []
        packed = self._pack(plain.t() if transposed else plain, *arguments)
        self.form = Form(packed, sizes, torch.get_num_threads())

    def pack_for(self, sizes: Sequence[int]) -> None:
        """Pack a convolution's weight for other sizes of its input, and the threads of now."""
        packed = self._pack(self.form.tensor.to_dense(), *self._options, list(sizes))
        self.form = Form(packed, list(sizes), torch.get_num_threads())

    def unpack(self) -> None:
        """Hold a convolution's weight in the plain layout, which suits no size and every one."""
        self.form = Form(self.form.tensor.to_dense(), [], torch.get_num_threads())

    def plain(self) -> torch.Tensor:
        """The weight in float32 in the layout that it has in the storable graph."""
        dense = self.form.tensor.to_dense()
        dense = dense.t() if self._transposed else dense
        if dense.stride() == self._stride:
            return dense
        return torch.empty_strided(dense.shape, self._stride).copy_(dense)


class _Forms:
    """The forms in which a plan holds one constant, each made once: plain, and packed."""

    def __init__(self, reduced: torch.Tensor, workspace: _Workspace) -> None:
        self._reduced = reduced
        self._workspace = workspace
        self._plain: torch.Tensor | None = None
        self._packed: dict[str, PackedWeight] = {}

    @property
    def reduced_bytes(self) -> int:
        """Size of the constant in its reduced dtype."""
        return self._reduced.nbytes

    def replace(self, editor: Editor, cast: Node) -> dict[str, PackedWeight]:
        """Replace a cast by constants, each user's in the form that it takes.

        Returns:
            Packed weights that are no constants, by the name of what packed each.
        """
        weights = {}
        for use in cast.output().uses():
            if use.user.kind() == "aten::t":
                self._replace_transpose(editor, use.user)
            elif use.user.kind() == "mkldnn::_reorder_linear_weight":
                self._hold_packed(editor, use.user)
            elif use.user.kind() in _PACKERS:
                weights[use.user.output().debugName()] = self._pack(use.user)
                use.user.destroy()
        if cast.output().uses():
            if self._plain is None:
                self._plain = self._reduced.to(torch.float32)
            cast.output().replaceAllUsesWith(editor.constant_before(cast, self._plain))
        reduced = cast.inputsAt(0)
        cast.destroy()
        if not reduced.uses():
            reduced.node().destroy()
        return weights

    def _replace_transpose(self, editor: Editor, transpose: Node) -> None:
        for use in transpose.output().uses():
            if use.user.kind() == "mkldnn::_reorder_linear_weight":
                self._hold_packed(editor, use.user, transposed=True)
        if not transpose.output().uses():
            transpose.destroy()

    def _hold_packed(self, editor: Editor, packing: Node, *, transposed: bool = False) -> None:
        holder = editor.node_before(packing, "prim::ConstantMKLDNNTensor")
        holder.t_("value", self._pack(packing, transposed=transposed).form.tensor)
        packing.output().replaceAllUsesWith(holder.output())
        packing.destroy()

    def _pack(self, packing: Node, *, transposed: bool = False) -> PackedWeight:
        arguments = [constant(value) for value in list(packing.inputs())[1:]]
        key = str((arguments, transposed))
        if key not in self._packed:
            plain = self._workspace.widen(self._reduced)
            stride, kind = self._reduced.stride(), packing.kind()
            self._packed[key] = PackedWeight(plain, stride, kind, arguments, transposed=transposed)
        return self._packed[key]

    def recovery(self) -> Callable[[], torch.Tensor]:
        """A function that returns the constant in float32, from a form that the plan keeps."""
        if self._plain is not None:
            plain = self._plain
            return lambda: plain
        packed, *_ = self._packed.values()
        return packed.plain


def _pack_linear(weight: torch.Tensor, rows: int) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def _pack_convolution(weight: torch.Tensor, *arguments: object) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_convolution_weight(weight, *arguments)
    return packed


_PACKERS: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    "mkldnn::_reorder_linear_weight": _pack_linear,
    "mkldnn::_reorder_convolution_weight": _pack_convolution,
}


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
