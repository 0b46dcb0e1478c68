"""Operators that compute otherwise where a tensor requires gradients, as the model ran them.

``matmul`` folds the leading dimensions of its larger operand into rows, and makes one product of
many; where folding takes a copy, it does so only if the other operand requires gradients. Attention
with a mask that does has no fused kernel on the CPU, and singular values and eigenvalues come with
their vectors. A frozen program's weights require none, and it would take the other path, whose bits
are others; so the path that the recorded run took is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from amp_script.lowering._graph import Editor, Graph, Value, nodes_of
from amp_script.lowering.composites.registry import Decomposition
from amp_script.lowering.helpers import cached_casts_are_differentiable

__all__ = ["MARK", "mark_gradient_paths", "write_out_gradient_paths", "write_out_products"]


# What torch does there ----------------------------------------------------------------------------


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


def _linear_of_any_size(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.is_contiguous():
        return torch.nn.functional.linear(x, weight, bias)
    return _linear(x, weight, bias)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    output: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        None,
        scale=scale,
        enable_gqa=enable_gqa,
    )[0]
    return output


def _singular_values(matrix: Tensor, driver: str | None) -> Tensor:
    values: Tensor = torch.linalg.svd(matrix, full_matrices=False, driver=driver)[1]
    return values


def _eigenvalues(matrix: Tensor, triangle: str) -> Tensor:
    values: Tensor = torch.linalg.eigh(matrix, triangle)[0]
    return values


# When ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Path:
    """What an operator does where a tensor requires gradients.

    Attributes:
        is_taken: asked of the operator's inputs, in a recording that is still being made, whose
            types say what the tensors were.
        body: what torch does then.
        is_product: whether it is a product, whose bits alone are no reason to record a model twice.
    """

    is_taken: Callable[[Sequence[Value]], bool]
    body: Decomposition
    is_product: bool


def _folds(x: int, weight: int) -> Callable[[Sequence[Value]], bool]:
    """Whether folding the input numbered ``x`` takes a copy, and the weight has torch fold it."""

    def is_taken(inputs: Sequence[Value]) -> bool:
        larger: Any = inputs[x].type()
        smaller: Any = inputs[weight].type()
        if larger.dim() is None or smaller.dim() is None:
            return False
        if larger.dim() < 3 or smaller.dim() > 2 or not _requires_grad(inputs[weight]):
            return False
        if _is_kept_cast(inputs[weight]) and not smaller.requires_grad():
            return False  # compute plans pack the layer as it is; verification compares the bits
        return weight < x or not _is_contiguous(larger)

    return is_taken


def _folds_in_float32(inputs: Sequence[Value]) -> bool:
    """The same of a layer that no compute plan packs, so that it may branch."""
    weight: Any = inputs[1].type()
    return _folds(0, 1)(inputs) and weight.scalarType() == "Float"


def _has_mask_with_grad(inputs: Sequence[Value]) -> bool:
    query: Any = inputs[0].type()
    on_cpu = query.device() is None or query.device().type == "cpu"
    return on_cpu and _requires_grad(inputs[3])


def _matrix_requires_grad(inputs: Sequence[Value]) -> bool:
    return _requires_grad(inputs[0])


def _when(
    is_taken: Callable[[Sequence[Value]], bool],
    operator: str,
    body: Callable[..., object],
    *,
    is_product: bool = False,
) -> _Path:
    return _Path(is_taken, Decomposition(operator, body), is_product)


MARK: Final = "gradient_path"
"""The attribute by which an operator is marked."""

_WEIGHT: Final = "prim::TracedAttr"
"""A tensor of the module's, in a recording that is still being made."""

_MATMUL: Final = (
    _when(_folds(0, 1), "aten::matmul", _matmul, is_product=True),
    _when(_folds(1, 0), "aten::matmul", _matmul_from_left, is_product=True),
)

# Of several paths of an operator, the first that is taken counts.
_PATHS: Final[Mapping[str, tuple[_Path, ...]]] = {
    "aten::linear": (
        _when(_folds_in_float32, "aten::linear", _linear_of_any_size, is_product=True),
        _when(_folds(0, 1), "aten::linear", _linear, is_product=True),
    ),
    "aten::matmul": _MATMUL,
    "aten::linalg_matmul": _MATMUL,
    "aten::scaled_dot_product_attention": (
        _when(_has_mask_with_grad, "aten::scaled_dot_product_attention", _attention),
    ),
    "aten::linalg_svdvals": (
        _when(_matrix_requires_grad, "aten::linalg_svdvals", _singular_values),
    ),
    "aten::linalg_eigvalsh": (_when(_matrix_requires_grad, "aten::linalg_eigvalsh", _eigenvalues),),
}


def mark_gradient_paths(graph: Graph) -> None:
    """Mark the operators that took another path because a weight requires gradients.

    Args:
        graph: a recording that is still being made, whose types say what the tensors were.
    """
    for node in nodes_of(graph):
        inputs = list(node.inputs())
        paths = enumerate(_PATHS.get(node.kind(), ()))
        taken = next((index for index, path in paths if path.is_taken(inputs)), None)
        if taken is not None:
            node.i_(MARK, taken)


def write_out_gradient_paths(graph: Graph) -> None:
    """Put what torch did in the place of the operators that are marked, products excepted.

    Args:
        graph: the recording, complete; changed in place.
    """
    _write_out(graph, products=False)


def write_out_products(graph: Graph) -> None:
    """Put what torch did in the place of the products that are marked.

    That comes after recordings have been compared: a program has no path of its own for products
    alone, whose result differs in the last bits, and then has the path without gradients.

    Args:
        graph: the recording, complete; changed in place.
    """
    _write_out(graph, products=True)


def _write_out(graph: Graph, *, products: bool) -> None:
    editor = Editor(graph)
    for node in list(nodes_of(graph)):
        if not node.hasAttribute(MARK):
            continue
        path = _PATHS[node.kind()][node.i(MARK)]
        if path.is_product == products:
            (result,) = editor.graph_before(node, path.body.graph(), list(node.inputs()))
            node.output().replaceAllUsesWith(result)
            node.destroy()


def _requires_grad(value: Value) -> bool:
    """Whether a tensor requires gradients because a weight that it is made of does.

    What requires them because an input does is left alone: the program's own input then does, too.
    """
    kind: Any = value.type()
    if kind.kind() == "TensorType" and not kind.requires_grad():
        return _is_kept_cast(value)
    pending, seen = [value], set()
    while pending:
        node = pending.pop().node()
        if node.kind() == _WEIGHT or any(map(_is_kept_cast, node.outputs())):
            return True
        for each in node.inputs():
            kind = each.type()
            differentiable = kind.kind() != "TensorType" or kind.requires_grad()
            if differentiable and each.debugName() not in seen:
                seen.add(each.debugName())
                pending.append(each)
    return False


def _is_kept_cast(value: Value) -> bool:
    """Whether a value is a weight's cast, which eager autocast keeps and gives gradients.

    Recordings are made without autocast's cache, and have casts without gradients where the run
    has none.
    """
    node = value.node()
    if node.kind() != "aten::to" or not cached_casts_are_differentiable():
        return False
    weight: Any = node.inputsAt(0)
    return bool(
        weight.node().kind() == _WEIGHT
        and weight.type().requires_grad()
        and weight.type().scalarType() == "Float"
    )


def _is_contiguous(kind: Any) -> bool:
    """Whether strides are those of a contiguous tensor, in dimensions of size 1 too.

    There they tell that the tensor would not be contiguous in another size.
    """
    stride = 1
    for size, found in zip(reversed(kind.sizes()), reversed(kind.strides()), strict=True):
        if found != stride:
            return False
        stride *= max(size, 1)
    return True
