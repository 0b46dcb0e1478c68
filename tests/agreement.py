"""Comparing a scripted program with the eager one: dtypes, bits and errors."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amp_script import jit_autocast_pass
from amp_script.lowering._graph import dtype_code

RUNS = 3
"""TorchScript's executor changes its code after the first runs."""

AMBIENT = (None, torch.bfloat16, torch.float16)
"""Autocast around the call: none, and on the CPU in either dtype."""


@contextmanager
def ambient_autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """The caller's region."""
    if dtype is None:
        yield
        return
    with torch.autocast("cpu", dtype=dtype):
        yield


def leaves(result: Any) -> list[Any]:
    """What is in a result, in order."""
    if isinstance(result, (tuple, list)):
        return [leaf for part in result for leaf in leaves(part)]
    return [result]


def assert_same(got: Any, want: Any) -> None:
    """Assert that two results have the same dtypes and bits."""
    got_leaves, want_leaves = leaves(got), leaves(want)
    assert len(got_leaves) == len(want_leaves)
    for one, other in zip(got_leaves, want_leaves, strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        elif isinstance(other, torch.dtype):
            # TorchScript's dtypes are numbers.
            assert one == dtype_code(other)
        else:
            assert one == other


def assert_agrees(
    scripted: Callable[..., Any],
    eager: Callable[..., Any],
    *args: Any,
    ambient: Sequence[torch.dtype | None] = AMBIENT,
) -> None:
    """Assert that a scripted program does what the eager one does, or raises where it does.

    Eager code may call TorchScript too, so the JIT pass is off.
    """
    for dtype in ambient:
        for _ in range(RUNS):
            with torch.no_grad(), ambient_autocast(dtype):
                try:
                    with jit_autocast_pass(False):
                        want = eager(*args)
                except RuntimeError:
                    want = RuntimeError
                try:
                    got = scripted(*args)
                except (RuntimeError, torch.jit.Error):
                    got = RuntimeError
            assert_same(got, want)


def saved_and_loaded(scripted: Any) -> Any:
    """What plain TorchScript makes of the saved program."""
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)
