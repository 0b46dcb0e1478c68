"""Keeping ``addmm`` whole.

TorchScript's executor splits ``addmm`` with ``alpha = beta = 1`` into a product and a sum, which
rounds once more in lower precision. It does so only when both are constants it can fold, so they
become a value that it cannot: the number of dimensions of a matrix, less one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._graph import Editor, constant, is_constant
from .regions import Site


def keep_addmm_whole(editor: Editor, sites: Sequence[Site]) -> None:
    """Hide the ones that the executor looks for in each ``aten::addmm``."""
    for node in (site.node for site in sites):
        if node.kind() != "aten::addmm":
            continue
        beta, alpha = node.inputsAt(3), node.inputsAt(4)
        if all(is_constant(scale) and constant(scale) == 1 for scale in (beta, alpha)):
            dimensions = editor.node_before(node, "aten::dim", node.inputsAt(1)).output()
            dimensions.setType(torch._C.IntType.get())
            less = editor.constant_before(node, 1)
            one = editor.node_before(node, "aten::sub", dimensions, less).output()
            one.setType(torch._C.IntType.get())
            node.replaceInput(3, one)
            node.replaceInput(4, one)
