"""Operators that tracing recorded in the place of those that were called.

Of a convolution tracing records the operator that its kernel calls, ``aten::_convolution``, which
autocast on the CPU does not know: it has cast already when it calls it. A program that was traced
without autocast must get those casts later.
"""

from __future__ import annotations

from ._graph import Graph


def name_convolutions(graph: Graph) -> None:
    """Make recorded convolutions ones that autocast knows on every device.

    That is the overload without the last argument, for which its kernel puts what it is anyway.
    """
    for node in graph.findAllNodes("aten::_convolution"):
        if node.inputsSize() == 13:
            node.removeInput(12)
