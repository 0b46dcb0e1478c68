"""Keeping ``addmm`` whole.

TorchScript's executor splits ``addmm`` with ``alpha = beta = 1`` into a product and a sum, which
rounds once more in lower precision. It does so only when both are constants it can fold, so they
become a value that it cannot: the number of dimensions of a matrix, less one.
"""

from __future__ import annotations

from ._graph import Editor, Node, constant, is_constant

_ONE = """
def one(matrix: Tensor) -> int:
    return matrix.dim() - 1
"""


def keep_addmm_whole(editor: Editor, nodes: list[Node]) -> None:
    """Hide the ones that the executor looks for in each ``aten::addmm`` among the nodes."""
    for node in nodes:
        if node.kind() != "aten::addmm":
            continue
        beta, alpha = node.inputsAt(3), node.inputsAt(4)
        if all(is_constant(scale) and constant(scale) == 1 for scale in (beta, alpha)):
            one = editor.before(node, _ONE, node.inputsAt(1))
            node.replaceInput(3, one)
            node.replaceInput(4, one)
