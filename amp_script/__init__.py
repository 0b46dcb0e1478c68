"""Automatic mixed precision, exact for TorchScript."""

from amp_script.accuracy import compare_layers
from amp_script.artifact import load, save
from amp_script.autocast_mode import autocast, autocast_decorator, is_autocast_available
from amp_script.autograd import custom_bwd, custom_fwd
from amp_script.exporting import export
from amp_script.float32_blocks import keep_float32
from amp_script.jit_state import jit_autocast_pass
from amp_script.report import precision_report
from amp_script.scripting import lower, script
from amp_script.stubgen import generate_stub
from amp_script.tracing import trace_and_freeze
from amp_script.verification import verify

__all__ = [
    "autocast",
    "autocast_decorator",
    "compare_layers",
    "custom_bwd",
    "custom_fwd",
    "export",
    "generate_stub",
    "is_autocast_available",
    "jit_autocast_pass",
    "keep_float32",
    "load",
    "lower",
    "precision_report",
    "save",
    "script",
    "trace_and_freeze",
    "verify",
]
