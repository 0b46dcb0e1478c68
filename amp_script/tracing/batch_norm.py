"""Folds batch norm into the layer before it, in float32, before the layer's weights are rounded.

A batch norm in evaluation mode multiplies each channel by a constant and adds another. The product
goes into the weights of the convolution or linear layer that it follows, the sum into the bias,
while both are still float32: the program then rounds the weights once, as eager autocast does, and
its result once, where eager autocast rounds the layer's and the norm's.

Only layers that run in lower precision are folded. One in a disabled region is exact as it is.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._jit_pass_constant_propagation``,
``torch._C.IntType``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from amp_script.lowering._graph import (
    Editor,
    Graph,
    Node,
    Value,
    constant,
    dtype_code,
    is_constant,
    is_none,
    nodes_of,
)

__all__ = ["fold_batch_norm"]


@dataclass(frozen=True)
class _Layer:
    """How a kind of layer holds its weights.

    Attributes:
        transposed: whether the weight is ``[in, out / groups, ...]``, not ``[out, in, ...]``.
        convolves: whether channels are dimension 1 of the result, as batch norm has them; those of
            a linear layer are the last dimension.
    """

    transposed: Callable[[Node], bool]
    convolves: bool = True


def _says(node: Node) -> bool:
    return bool(constant(node.namedInput("transposed")))


_LAYERS: Final[Mapping[str, _Layer]] = {
    "aten::_convolution": _Layer(_says),
    "aten::convolution": _Layer(_says),
    "aten::_convolution_mode": _Layer(lambda node: False),
    "aten::conv1d": _Layer(lambda node: False),
    "aten::conv2d": _Layer(lambda node: False),
    "aten::conv3d": _Layer(lambda node: False),
    "aten::conv_transpose1d": _Layer(lambda node: True),
    "aten::conv_transpose2d": _Layer(lambda node: True),
    "aten::conv_transpose3d": _Layer(lambda node: True),
    "aten::linear": _Layer(lambda node: False, convolves=False),
}


# Every layer above takes (input, weight, bias, ...).
_WEIGHT: Final = 1
_BIAS: Final = 2


def fold_batch_norm(graph: Graph, dtype: torch.dtype) -> int:
    """Fold every batch norm that directly follows a layer in lower precision.

    Args:
        graph: of a traced method, calls inlined, weights attached as constants and not yet
            rounded; changed in place.
        dtype: dtype that the region casts weights to.

    Returns:
        How many were folded.
    """
    pairs = [pair for node in nodes_of(graph) if (pair := _pair(node, dtype)) is not None]
    with _unrounded(graph, pairs, dtype):
        # Weights that are computed, as weight norm does, become constants too.
        torch._C._jit_pass_constant_propagation(graph)
        editor = Editor(graph)
        return sum(_fold(editor, pair) for pair in pairs)


@dataclass(frozen=True)
class _Pair:
    """A layer, the batch norm after it, and the casts of the layer's weight and bias."""

    layer: Node
    norm: Node
    weight_cast: Node
    bias_cast: Node | None

    @property
    def casts(self) -> list[Node]:
        return [self.weight_cast] + ([] if self.bias_cast is None else [self.bias_cast])


def _pair(norm: Node, dtype: torch.dtype) -> _Pair | None:
    if norm.kind() != "aten::batch_norm":
        return None
    layer = norm.namedInput("input").node()
    form = _LAYERS.get(layer.kind())
    if form is None or len(layer.output().uses()) != 1:
        return None
    if not form.convolves and _rank(layer.output()) != 2:
        return None
    weight_cast = _cast(layer.inputsAt(_WEIGHT), dtype)
    bias = layer.inputsAt(_BIAS)
    bias_cast = None if is_none(bias) else _cast(bias, dtype)
    if weight_cast is None or (bias_cast is None and not is_none(bias)):
        return None
    return _Pair(layer, norm, weight_cast, bias_cast)


def _cast(value: Value, dtype: torch.dtype) -> Node | None:
    """The node that rounds a weight, where one does."""
    node = value.node()
    rounds = (
        node.kind() == "aten::to"
        and is_constant(node.inputsAt(1))
        and constant(node.inputsAt(1)) == dtype_code(dtype)
    )
    return node if rounds else None


def _rank(value: Value) -> int | None:
    kind: Any = value.type()
    sizes: Sequence[int] | None = kind.sizes()
    return None if sizes is None else len(sizes)


@contextmanager
def _unrounded(graph: Graph, pairs: Sequence[_Pair], dtype: torch.dtype) -> Iterator[None]:
    """Keep the casts of weights from being folded inside the block, by hiding what they cast to."""
    hidden = graph.addInput("dtype")
    hidden.setType(torch._C.IntType.get())
    try:
        for pair in pairs:
            for cast in pair.casts:
                cast.replaceInput(1, hidden)
        yield
    finally:
        if pairs:
            known = Editor(graph).shared_constant(dtype, dtype_code(dtype))
            hidden.replaceAllUsesWith(known)
        graph.eraseInput(len(list(graph.inputs())) - 1)


def _fold(editor: Editor, pair: _Pair) -> bool:
    layer, norm = pair.layer, pair.norm
    weight = pair.weight_cast.inputsAt(0)
    bias = layer.inputsAt(_BIAS) if pair.bias_cast is None else pair.bias_cast.inputsAt(0)
    names = ("weight", "bias", "running_mean", "running_var", "training", "eps")
    groups = [layer.namedInput("groups")] if _LAYERS[layer.kind()].convolves else []
    values = [weight, bias, *(norm.namedInput(name) for name in names), *groups]
    if not all(map(is_constant, values)):
        return False
    w, b, gain, shift, mean, variance, training, eps, *_ = map(constant, values)
    if training or mean is None or not w.is_floating_point():
        return False
    scale = torch.rsqrt(variance.double() + eps)
    if gain is not None:
        scale = scale * gain.double()
    moved = (-mean.double() if b is None else b.double() - mean.double()) * scale
    if shift is not None:
        moved = moved + shift.double()
    transposed = _LAYERS[layer.kind()].transposed(layer)
    scaled = _scale(w.double(), scale, constant(groups[0]) if transposed else None)
    for position, value in ((_WEIGHT, scaled), (_BIAS, moved)):
        layer.replaceInput(position, _rounded(editor, pair.weight_cast, layer, value.to(w.dtype)))
    norm.output().replaceAllUsesWith(layer.output())
    norm.destroy()
    return True


def _scale(weight: torch.Tensor, scale: torch.Tensor, groups: int | None) -> torch.Tensor:
    """Multiply the weights of each output channel; ``groups`` is given for transposed layouts."""
    if groups is None:
        return weight * scale.view(-1, *[1] * (weight.dim() - 1))
    inputs, outputs, *kernel = weight.shape  # [in, out / groups, ...]
    grouped = weight.view(groups, inputs // groups, outputs, *kernel)
    return (grouped * scale.view(groups, 1, outputs, *[1] * len(kernel))).view(weight.shape)


def _rounded(editor: Editor, cast: Node, layer: Node, value: torch.Tensor) -> Value:
    """Insert a weight and a cast of it like ``cast``."""
    weight = editor.constant_before(layer, value)
    node = editor.node_before(layer, "aten::to", weight, *list(cast.inputs())[1:])
    return node.output()
