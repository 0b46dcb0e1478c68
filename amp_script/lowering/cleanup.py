"""Removing what lowering left over.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._jit_pass_constant_propagation``,
``_jit_pass_peephole``, ``_jit_pass_constant_pooling``, ``_jit_pass_dce``, ``_jit_pass_lint``.
"""

from __future__ import annotations

import torch

from ._graph import Graph


def clean_up(graph: Graph) -> None:
    """Fold what is constant, take known branches, and drop what nothing uses."""
    torch._C._jit_pass_constant_propagation(graph)
    torch._C._jit_pass_peephole(graph)
    torch._C._jit_pass_constant_pooling(graph)
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_lint(graph)
