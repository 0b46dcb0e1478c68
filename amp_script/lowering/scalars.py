"""Keeping scalar constants tensors.

TorchScript's executor makes a number of a constant without dimensions that is added, subtracted,
multiplied with or divided by. A number widens nothing, and such a tensor does: bfloat16 and a
float32 constant, both without dimensions, make float32. So the constant becomes a view of itself
that the executor cannot fold: its dimensions are put in the order of the first none of another
tensor's sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from ._graph import Editor, Graph, Node, compiled_graph, constant, is_constant

_VIEW = """
def view(scalar: Tensor, other: Tensor) -> Tensor:
    return scalar.permute(other.size()[:0])
"""


def keep_scalars_tensors(
    editor: Editor, is_needless: Callable[[Node], bool] = lambda node: False
) -> None:
    """Hide each constant of a graph of which the executor would make a number.

    Args:
        editor: of the graph.
        is_needless: whether an operator surely gives the same with a number.
    """
    for kind in ("aten::add", "aten::sub", "aten::mul", "aten::div"):
        for node in editor.graph.findAllNodes(kind):
            if not node.schema().startswith(f"{kind}.Tensor("):
                continue
            tensor, scalar = node.inputsAt(0), node.inputsAt(1)
            held = constant(scalar) if is_constant(scalar) else None
            if isinstance(held, torch.Tensor) and held.dim() == 0 and not is_needless(node):
                (hidden,) = editor.graph_before(node, _view(), (scalar, tensor))
                node.replaceInput(1, hidden)


@cache
def _view() -> Graph:
    return compiled_graph(_VIEW, {})
