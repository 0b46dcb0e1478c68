"""Folding what is constant before lowering, and removing what it left over.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._jit_pass_peephole``,
``_jit_pass_constant_propagation_immutable_types``, ``_jit_pass_constant_pooling``,
``_jit_pass_dce``, ``_jit_pass_erase_shape_information``.
"""

from __future__ import annotations

from ._graph import _C, Graph


def fold(graph: Graph) -> None:
    """Fold constants that are no tensors, take known branches, and drop what nothing uses.

    What tracing recorded about dtypes goes first: under autocast it need not hold.
    """
    _C._jit_pass_erase_shape_information(graph)
    _C._jit_pass_constant_propagation_immutable_types(graph)
    _C._jit_pass_peephole(graph)
    _C._jit_pass_dce(graph)


def tidy(graph: Graph) -> None:
    """Fold what became constant by lowering, and drop what nothing uses."""
    _C._jit_pass_constant_propagation_immutable_types(graph)
    _C._jit_pass_dce(graph)
    _C._jit_pass_constant_pooling(graph)
