"""Automatic mixed precision, exact for TorchScript."""

from amp_script.artifact import load, save
from amp_script.jit_state import jit_autocast_pass
from amp_script.scripting import script
from amp_script.tracing import trace_and_freeze
from amp_script.verification import verify

__all__ = ["jit_autocast_pass", "load", "save", "script", "trace_and_freeze", "verify"]
