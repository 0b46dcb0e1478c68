"""Products with weights that require gradients, as torch multiplies them.

``matmul`` folds the leading dimensions of its larger operand into rows, and makes one product of
many. Where that operand is not contiguous, folding takes a copy, which torch makes only if the
other operand requires gradients. A frozen program's weights do not, and it would take the other
path, whose bits are others; so the path that the recorded run took is written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from amp_script.lowering._graph import Editor, Graph, nodes_of
from amp_script.lowering.composites.registry import Decomposition

__all__ = ["mark_folded_products", "write_out_folded_products"]


def _matmul(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    product = torch.mv(rows, weight) if weight.dim() == 1 else torch.mm(rows, weight)
    return torch.unflatten(product, 0, x.size()[:-1])


def _matmul_from_left(weight: Tensor, x: Tensor) -> Tensor:
    if weight.dim() == 1:
        return _matmul(x.mT, weight)
    return _matmul(x.mT, weight.t()).mT.contiguous()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = _matmul(x, weight.t())
    return product if bias is None else product.add_(bias)


_MARK: Final = "folded"

_Body = tuple[int, int, Decomposition]
"""Where the larger operand is among an operator's inputs, and the weight, and what torch does."""

_FOLDED: Final[Mapping[str, tuple[_Body, ...]]] = {
    "aten::linear": ((0, 1, Decomposition("aten::linear", _linear)),),
    "aten::matmul": (
        (0, 1, Decomposition("aten::matmul", _matmul)),
        (1, 0, Decomposition("aten::matmul", _matmul_from_left)),
    ),
}


def mark_folded_products(graph: Graph) -> None:
    """Mark the products that were folded because a weight requires gradients.

    Args:
        graph: a recording that is still being made, whose types say what the tensors were.
    """
    for node in nodes_of(graph):
        inputs = list(node.inputs())
        for index, (x, weight, _) in enumerate(_FOLDED.get(node.kind(), ())):
            if _is_folded_for(inputs[x].type(), inputs[weight].type()):
                node.i_(_MARK, index)


def write_out_folded_products(graph: Graph) -> None:
    """Put what torch did in the place of the products that are marked.

    Args:
        graph: the recording, complete; changed in place.
    """
    editor = Editor(graph)
    for node in list(nodes_of(graph)):
        if node.hasAttribute(_MARK):
            _, _, body = _FOLDED[node.kind()][node.i(_MARK)]
            (result,) = editor.graph_before(node, body.graph(), list(node.inputs()))
            node.output().replaceAllUsesWith(result)
            node.destroy()


def _is_folded_for(x: Any, weight: Any) -> bool:
    """Whether torch folds an operand of the one type because the other requires gradients."""
    if x.dim() is None or weight.dim() is None or x.dim() < 3 or weight.dim() > 2:
        return False
    return bool(weight.requires_grad()) and not _is_contiguous(x)


def _is_contiguous(kind: Any) -> bool:
    stride = 1
    for size, found in zip(reversed(kind.sizes()), reversed(kind.strides()), strict=True):
        if size != 1 and found != stride:
            return False
        stride *= size
    return True
