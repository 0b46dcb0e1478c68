"""Keeping ``addmm`` whole.

TorchScript's executor splits ``addmm`` with ``alpha = beta = 1`` into a product and a sum, which
rounds once more in lower precision. It does so only when both are constants it can fold, so they
become a value that it cannot: the number of dimensions of a matrix, less one.
"""

from __future__ import annotations

import torch

from ._graph import Editor, constant, is_constant


def keep_addmm_whole(editor: Editor) -> None:
    """Hide the ones that the executor looks for in each ``aten::addmm`` of a graph."""
    integer = torch._C.IntType.get()
    for node in editor.graph.findAllNodes("aten::addmm"):
        scales = node.inputsAt(3), node.inputsAt(4)
        if all(is_constant(scale) and constant(scale) == 1 for scale in scales):
            dimensions = editor.node_before(node, "aten::dim", node.inputsAt(1)).output()
            less = editor.constant_before(node, 1)
            one = editor.node_before(node, "aten::sub", dimensions, less).output()
            dimensions.setType(integer)
            one.setType(integer)
            node.replaceInput(3, one)
            node.replaceInput(4, one)
