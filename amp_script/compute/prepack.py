"""The packing pass: oneDNN kernels whose weights are reordered once, when a program is loaded.

Linear layers and convolutions that the upcast pass has put in float32 get their constant weights in
the layout that oneDNN's kernels read, which saves the reordering on each call; convolutions also
work on channels-last memory. Activations stay where they are: oneDNN's fused ReLU turns NaN into
zero, which eager mode does not.

The best layout of a convolution's weights depends on its input's sizes, and one for other sizes is
reordered by a slow routine on every call. So a packed convolution takes its weights and the sizes
that they suit as inputs of the graph, which returns the sizes that it saw beside its result: see
:mod:`amp_script.compute.packing`. Where the sizes are others, the weights are taken through the
plain layout. A linear layer's layout suits any number of rows.

A packed weight cannot be saved: ``torch.jit.save`` writes such a graph without its weights. It
lives in the plan's own graph alone.

Convolutions of one dimension gain nothing (measured on those of wav2vec 2.0: oneDNN's result is in
channels-last memory, and putting it back takes what the packed weights save), and stay.

Private names used here, present in torch 2.6 to 2.15: the operators named in this file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from amp_script.lowering._graph import (
    Editor,
    Graph,
    Node,
    Value,
    constant,
    is_constant,
    is_tensor,
    nodes_of,
)

from .dtypes import cast_dtype
from .templates import insert

__all__ = ["prepack", "weighted_inputs"]

_SMALLEST_LINEAR: Final = 1 << 16
"""Elements of a linear layer's weight from which packing pays: below, the call itself costs more
than the product (measured: 64 by 64 is 5 times slower packed, 768 by 768 a fifth faster)."""

_FEWEST_ROWS: Final = 4
"""Rows of a linear layer's input from which packing pays (measured: 1 row is up to 1.7 times
slower packed, 4 rows are faster)."""

_LINEAR = """
def linear(x: Tensor, weight: Tensor, bias: Optional[Tensor], rows: int) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
"""

_ADDMM = """
def addmm(x: Tensor, weight: Tensor, bias: Tensor, rows: int) -> Tensor:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.t(), rows)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
"""

_SIZE = """
def size(x: Tensor) -> List[int]:
    return x.size()
"""

_PACK = """
def pack(
    weight: Tensor, size: List[int],
    stride: List[int], padding: List[int], dilation: List[int], groups: int
) -> Tensor:
    return torch.ops.mkldnn._reorder_convolution_weight(
        weight, padding, stride, dilation, groups, size)
"""

_CONVOLUTION = """
def convolution(
    x: Tensor, packed: Tensor, bias: Optional[Tensor],
    size: List[int], packed_for: List[List[int]], index: int,
    stride: List[int], padding: List[int], dilation: List[int], groups: int
) -> Tensor:
    if size[1:] != packed_for[index][1:]:
        packed = packed.to_dense()
    return torch.ops.mkldnn._convolution_pointwise(
        x, packed, bias, padding, stride, dilation, groups, "none", [], "")
"""

_TRANSPOSED = """
def transposed(
    x: Tensor, weight: Tensor, bias: Optional[Tensor],
    stride: List[int], padding: List[int], dilation: List[int], output_padding: List[int],
    groups: int
) -> Tensor:
    return torch.ops.mkldnn._convolution_transpose_pointwise(
        x, weight, bias, padding, output_padding, stride, dilation, groups, "none", [], "")
"""


@dataclass(frozen=True)
class _Arguments:
    """Where a convolution's arguments are among its node's inputs."""

    stride: int
    padding: int
    dilation: int
    groups: int
    output_padding: int | None = None
    transposed: int | None = None

    def is_transposed(self, inputs: Sequence[Value]) -> bool:
        """Whether the convolution is a transposed one, by its kind or by its argument."""
        if self.transposed is not None:
            return bool(constant(inputs[self.transposed]))
        return self.output_padding is not None


_CONVOLUTIONS: Final[Mapping[str, _Arguments]] = {
    "aten::_convolution": _Arguments(3, 4, 5, 8, output_padding=7, transposed=6),
    "aten::convolution": _Arguments(3, 4, 5, 8, output_padding=7, transposed=6),
    "aten::conv2d": _Arguments(3, 4, 5, 6),
    "aten::conv3d": _Arguments(3, 4, 5, 6),
    "aten::conv_transpose2d": _Arguments(3, 4, 7, 6, output_padding=5),
    "aten::conv_transpose3d": _Arguments(3, 4, 7, 6, output_padding=5),
}

_INPUT: Final[Mapping[str, int]] = {"aten::linear": 0, "aten::addmm": 1}
"""Where the input of a product is among its node's inputs."""

_CONTIGUOUS = """
def contiguous(x: Tensor) -> Tensor:
    return x.contiguous()
"""

_CONTAINERS: Final = ("prim::TupleConstruct", "prim::ListConstruct", "prim::DictConstruct")

_ORDER_SENSITIVE: Final = frozenset(
    {
        "aten::_reshape_alias",
        "aten::_unsafe_view",
        "aten::as_strided",
        "aten::is_contiguous",
        "aten::stride",
        "aten::view_as",
        "aten::view_as_complex",
        "aten::view_as_real",
    }
)
"""Operators that see how memory is laid out; a program with one keeps its convolutions."""


def weighted_inputs(graph: Graph, changed: Collection[str]) -> set[str]:
    """Names of the inputs of the layers that :func:`prepack` may change: it needs their sizes."""
    return {
        node.inputsAt(_INPUT.get(node.kind(), 0)).debugName()
        for node in nodes_of(graph)
        if node.kind() in (*_INPUT, *_CONVOLUTIONS)
        if node.output().debugName() in changed
    }


def prepack(
    graph: Graph, changed: Collection[str], sizes: Mapping[str, Sequence[int]]
) -> list[str]:
    """Let layers that run in float32 pack their weights; folding then leaves the packed ones.

    Args:
        graph: a graph after the upcast pass, changed in place. Where a convolution is packed, it
            gets more inputs, which are what :class:`amp_script.compute.packing.Packing` gives, and
            returns its result and the sizes of the convolutions' inputs.
        changed: names of the results that the upcast pass computes in float32.
        sizes: sizes of the layers' inputs by name; layers whose input is not in it stay.

    Returns:
        Names of the values that pack the convolutions' weights, in the order of the inputs.
    """
    return _Packer(graph, sizes).run(changed)


class _Packer:
    """One run of the pass over one graph."""

    def __init__(self, graph: Graph, sizes: Mapping[str, Sequence[int]]) -> None:
        self._editor = Editor(graph)
        self._sizes = sizes
        self._nodes = nodes_of(graph)
        self._packed_for: Value | None = None
        self._packings: list[str] = []
        self._seen: list[Value] = []

    def run(self, changed: Collection[str]) -> list[str]:
        any_order = self._may_take_any_order()
        convolutions = False
        for node in self._nodes:
            if node.outputsSize() != 1 or node.output().debugName() not in changed:
                continue
            if node.kind() == "aten::linear":
                self._pack_linear(node, _LINEAR, *node.inputs())
            elif node.kind() == "aten::addmm" and _is_layer(node):
                bias, x, weight, *_ = node.inputs()
                self._pack_linear(node, _ADDMM, x, weight, bias)
            elif node.kind() in _CONVOLUTIONS and any_order:
                convolutions |= self._pack_convolution(node, _CONVOLUTIONS[node.kind()])
        if convolutions:
            self._allow_any_order()
        if self._seen:
            self._return_sizes()
        return self._packings

    def _pack_linear(self, node: Node, source: str, x: Value, weight: Value, bias: Value) -> None:
        sizes, shape = self._sizes.get(x.debugName()), _shape(weight)
        if sizes is None or len(shape) != 2 or math.prod(shape) < _SMALLEST_LINEAR:
            return
        rows = math.prod(sizes[:-1])
        if rows < _FEWEST_ROWS:
            return
        count = self._editor.constant_before(node, rows)
        self._replace(node, insert(self._editor, node, source, x, weight, bias, count))

    def _pack_convolution(self, node: Node, at: _Arguments) -> bool:
        """Give one convolution a oneDNN kernel if there is one; returns whether there is."""
        x, weight, bias, *_ = inputs = list(node.inputs())
        sizes, shape = self._sizes.get(x.debugName()), _shape(weight)
        options = [inputs[index] for index in (at.stride, at.padding, at.dilation)]
        if sizes is None or len(shape) not in (4, 5) or len(sizes) != len(shape):
            return False
        if not math.prod(shape):
            return False
        if not all(_is_list(value) for value in options):
            return False
        groups = inputs[at.groups]
        if at.is_transposed(inputs):
            rest = [*options, inputs[at.output_padding or 0], groups]
            made = insert(self._editor, node, _TRANSPOSED, x, weight, bias, *rest)
        else:
            example = self._editor.constant_before(node, list(sizes))
            packing = insert(self._editor, node, _PACK, weight, example, *options, groups)
            seen = insert(self._editor, node, _SIZE, x)
            rest = [seen, *self._inputs_of_next(node), *options, groups]
            made = insert(self._editor, node, _CONVOLUTION, x, self._packed(), bias, *rest)
            self._packings.append(packing.debugName())
            self._seen.append(seen)
        self._replace(node, made)
        return True

    def _inputs_of_next(self, node: Node) -> list[Value]:
        """The sizes that weights are packed for, and which of them the next convolution's is."""
        if self._packed_for is None:
            list_of = torch._C.ListType
            kind = list_of(list_of(torch._C.IntType.get()))
            self._packed_for = self._editor.add_input("packed_for", kind)
        return [self._packed_for, self._editor.constant_before(node, len(self._packings))]

    def _packed(self) -> Value:
        return self._editor.add_input("packed", torch._C.TensorType.get())

    def _return_sizes(self) -> None:
        """Return the sizes of the convolutions' inputs beside the result."""
        graph = self._editor.graph
        end, (result,) = graph.return_node(), graph.outputs()
        kind = torch._C.ListType(torch._C.IntType.get())
        sizes = self._editor.list_before(end, kind, self._seen)
        both = self._editor.node_before(end, "prim::TupleConstruct", result, sizes).output()
        both.setType(torch._C.TupleType([result.type(), sizes.type()]))
        graph.eraseOutput(0)
        graph.registerOutput(both)

    def _replace(self, node: Node, value: Value) -> None:
        node.output().replaceAllUsesWith(value)
        node.destroy()

    def _may_take_any_order(self) -> bool:
        """Whether nothing in the graph sees how the memory of a convolution's result is laid out,
        but for operators that :meth:`_allow_any_order` can change.
        """
        aliases: Any = self._editor.graph.alias_db()
        return not any(
            node.kind() in _ORDER_SENSITIVE
            or (node.kind() == "aten::view" and aliases.has_writers(node.output()))
            for node in self._nodes
        )

    def _allow_any_order(self) -> None:
        """Let views be copies where they must, and give results in the usual order."""
        for node in nodes_of(self._editor.graph):
            if node.schema().startswith("aten::view("):
                inputs = list(node.inputs())
                reshaped = self._editor.node_before(node, "aten::reshape", *inputs).output()
                reshaped.setType(node.output().type())
                node.output().replaceAllUsesWith(reshaped)
                node.destroy()
        end = self._editor.graph.return_node()
        for index, value in enumerate(list(end.inputs())):
            end.replaceInput(index, self._in_usual_order(value))

    def _in_usual_order(self, value: Value) -> Value:
        """The value with its tensors in contiguous memory, as far as containers are built here."""
        node = value.node()
        if is_tensor(value):
            return insert(self._editor, self._editor.graph.return_node(), _CONTIGUOUS, value)
        if node.kind() in _CONTAINERS and len(value.uses()) == 1:
            for index, item in enumerate(list(node.inputs())):
                if is_tensor(item):
                    node.replaceInput(index, insert(self._editor, node, _CONTIGUOUS, item))
        return value


def _is_layer(addmm: Node) -> bool:
    """Whether a product with a sum is a linear layer, as GPT-2 writes them: weight transposed."""
    bias, _, weight, *scales = addmm.inputs()
    return _shape(bias) == _shape(weight)[1:] and all(map(_is_one, scales))


def _is_one(scale: Value) -> bool:
    """Whether a scale is 1, or what :func:`keep_addmm_whole` writes for it: a matrix's dimensions
    less one.
    """
    if is_constant(scale):
        return bool(constant(scale) == 1)
    node = scale.node()
    return node.kind() == "aten::sub" and node.inputsAt(0).node().kind() == "aten::dim"


def _shape(weight: Value) -> torch.Size:
    """Sizes of a constant that is cast to float32; none for any other value."""
    cast = weight.node()
    if cast_dtype(cast) is torch.float32 and is_constant(cast.inputsAt(0)):
        shape: torch.Size = constant(cast.inputsAt(0)).shape
        return shape
    return torch.Size()


def _is_list(value: Value) -> bool:
    return is_constant(value) and isinstance(constant(value), list)
