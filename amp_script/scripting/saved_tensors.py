"""Exceptions of hooks on saved tensors, let through programs that run in TorchScript's interpreter.

Checkpointing stops a recomputation that has gone far enough by an exception in such a hook.
TorchScript puts an error of its own in the place of every exception. Newer torch says which hooks
are in force, so that what they raise can be noted; torch 2.6 does not, and there the count of saved
tensors tells what checkpointing's hook has raised.

Private names used here: ``torch._C._autograd._top_saved_tensors_default_hooks``, in torch 2.13 to
2.15; and in torch 2.6, which lacks it, ``torch.utils.checkpoint._StopRecomputationError`` and the
variables ``frame`` and ``gid`` of ``unpack_hook`` in that module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
from torch._C import _autograd
from torch.utils import checkpoint

__all__ = ["raising_what_hooks_raise"]


@contextmanager
def _raising_what_is_noted() -> Iterator[None]:
    hooks = _top_hooks and _top_hooks(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    raised: list[BaseException] = []

    def watched_pack(tensor: torch.Tensor) -> object:
        try:
            return pack(tensor)
        except BaseException as error:
            raised.append(error)
            raise

    try:
        with torch.autograd.graph.saved_tensors_hooks(watched_pack, unpack):
            yield
    except RuntimeError:
        if raised:
            raise raised[0] from None
        raise


@contextmanager
def _raising_what_checkpointing_raised() -> Iterator[None]:
    try:
        yield
    except RuntimeError:
        if _recomputation_is_over(sys._getframe()):
            raise checkpoint._StopRecomputationError from None
        raise


def _recomputation_is_over(frame: FrameType | None) -> bool:
    """Whether the innermost recomputation that the frame is in has saved all that is wanted."""
    while frame is not None:
        if frame.f_globals is vars(checkpoint) and frame.f_code.co_name == "unpack_hook":
            wanted, task = frame.f_locals["frame"], frame.f_locals["gid"]
            saved: int = wanted.recomp_counter[task]
            return wanted.early_stop and saved == len(wanted.weak_holders)
        frame = frame.f_back
    return False


_top_hooks = getattr(_autograd, "_top_saved_tensors_default_hooks", None)

raising_what_hooks_raise = (
    _raising_what_checkpointing_raised if _top_hooks is None else _raising_what_is_noted
)
"""A block in which a hook's exception is raised, in the place of TorchScript's error about it."""
