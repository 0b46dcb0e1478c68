"""The ambient cast cache: casts of weights that outlive one call of a scripted program.

Eager autocast casts a leaf tensor once in the outermost region, however many calls it spans, so
that its gradients add up in lower precision and weights are cast once. A scripted program that is
called in the caller's region must do the same, over calls, so its casts are kept here for as long
as eager autocast keeps its own.

When eager autocast drops its casts (the outermost region ends, or someone clears the cache) is
found out by a witness: a tensor of ours that goes through eager's cache. Its cast dies with the
cache, and takes ours along.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ScriptDict``,
``torch._C._DisableTorchDispatch``, ``torch._C._DisableFuncTorch``, and of ``torch._C._autograd``
``_saved_tensors_hooks_enable``, ``_disable`` and ``_get_disabled_error_message``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _autograd

from ..jit_state import AmbientState, in_a_new_thread

__all__ = ["ambient_cast_cache", "in_region"]


class _Caches(threading.local):
    """The thread's casts, those made in inference mode apart: gradients cannot use them.

    Eager autocast's cache is one for all threads. With a witness of its own a thread never takes
    what another thread holds for a moment longer for a sign that its own casts are still good.
    """

    def __init__(self) -> None:
        self.witness = in_a_new_thread(_new_witness)
        self.by_mode: dict[
            bool, tuple[weakref.ref[torch.Tensor], torch._C.ScriptDict[Any, Any]]
        ] = {}


def _new_witness() -> torch.Tensor:
    return torch.zeros(1, 1, dtype=torch.float32, requires_grad=True)


_caches = _Caches()


def in_region(state: AmbientState) -> bool:
    """Whether the calling thread is in an autocast region, enabled or not.

    Args:
        state: the thread's autocast state.
    """
    if state.any_enabled:
        return True
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return bool(nesting > 1)


def ambient_cast_cache() -> torch._C.ScriptDict[Any, Any]:
    """The casts of leaf tensors made so far in the calling thread's outermost region."""
    mode = torch.is_inference_mode_enabled()
    found = _caches.by_mode.get(mode)
    if found is not None and found[0]() is not None:
        return found[1]
    witnessed = _cast_through_eager_cache()
    by_mode = _caches.by_mode

    def forget(died: weakref.ref[torch.Tensor]) -> None:
        if mode in by_mode and by_mode[mode][0] is died:
            del by_mode[mode]

    # TorchScript finds out the type of a dictionary from what is in it.
    cache = torch._C.ScriptDict({_caches.witness: _caches.witness})
    by_mode[mode] = weakref.ref(witnessed, forget), cache
    return cache


def _cast_through_eager_cache() -> torch.Tensor:
    """The cast of the witness that eager autocast has in its cache, made if need be."""
    seen: list[torch.Tensor] = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        seen.append(saved)
        return saved

    before = (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableFuncTorch(),
        torch._C.DisableTorchFunction(),
        _saved_tensors_hooks(),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved),
    ):
        _set_state(True, torch.bfloat16, True)
        try:
            torch.mm(_caches.witness, _caches.witness)
        finally:
            _set_state(*before)
    return seen[0]


@contextmanager
def _saved_tensors_hooks() -> Iterator[None]:
    """Allow hooks on saved tensors, which torch.func forbids while it transforms a function."""
    forbidden = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if forbidden is None:
        yield
        return
    _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _autograd._saved_tensors_hooks_disable(forbidden)


def _set_state(enabled: bool, dtype: torch.dtype, cache_enabled: bool) -> None:
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache_enabled)
