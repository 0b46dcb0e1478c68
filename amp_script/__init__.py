"""Automatic mixed precision, exact for TorchScript."""

from amp_script.artifact import load, save
from amp_script.jit_state import jit_autocast_pass

__all__ = ["jit_autocast_pass", "load", "save"]
