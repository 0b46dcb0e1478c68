"""Tracing: a model's run, recorded under autocast, as a frozen program.

:mod:`~amp_script.tracing.freezing` is the whole way, step by step. The steps have a file each:
what surrounds the run (``session``), the recording itself (``recording``), operators that cannot
be recorded as they run (``missing_kernels``, ``python_operators``), methods that are compiled and
not recorded (``compiled_calls``), what becomes of the recorded graph (``constants``,
``specialise``, ``graph_difference``), and batch norm (``batch_norm``).
"""

from amp_script.tracing.freezing import Inputs, trace_and_freeze

__all__ = ["Inputs", "trace_and_freeze"]
