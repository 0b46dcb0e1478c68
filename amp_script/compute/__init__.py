"""Compute plans: reduced-precision kernels where the processor has them, float32 ones elsewhere.

A frozen program says which values are rounded to which dtype. On a processor without kernels for
that dtype PyTorch falls back to loops many times slower than float32, so a plan may take the same
rounded values through float32 kernels and round what comes out.
"""

from .plans import Compute, Description, Plan, choose, describe
from .processor import Kind, Processor
from .program import CppModule, Program, bake

__all__ = [
    "Compute",
    "CppModule",
    "Description",
    "Kind",
    "Plan",
    "Processor",
    "Program",
    "bake",
    "choose",
    "describe",
]
