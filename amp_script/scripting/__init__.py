"""Scripting: TorchScript programs with their autocast regions lowered to explicit casts.

:mod:`~amp_script.scripting.lowered` holds ``script`` and ``lower`` and what they return. Beneath
it: compiling so that the result can be lowered (``compilation``, ``early_exits``), a program and
its variants for each autocast state of the caller (``programs``), and casts of weights that
outlive a call (``cast_cache``). ``script_calls`` is for eager code that calls scripted programs
while it is traced or verified.
"""

from amp_script.scripting.lowered import LoweredFunction, LoweredModule, lower, script

__all__ = ["LoweredFunction", "LoweredModule", "lower", "script"]
