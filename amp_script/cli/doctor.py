"""``amp-script doctor``: what this machine and this torch make of mixed precision."""

from __future__ import annotations

from amp_script import compute
from amp_script.cli import output

__all__ = ["command"]


def command() -> None:
    """Show what the processor offers, and which compute plan `auto` takes on it.

    *native* uses reduced-precision kernels; *packed* and *upcast* take the same rounded values
    through float32 kernels, where the processor has no fast ones for the dtype.
    """
    output.table(compute.describe().rows())
