"""The tracer's state in the calling thread.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._get_tracing_state``,
``torch._C._set_tracing_state``, ``torch._C._get_value_trace``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_script.lowering._graph import Graph, Value

__all__ = ["is_recording", "recording_paused", "traced_graph", "value_trace"]

_C: Any = torch._C  # torch's stubs lack what tracing uses


def is_recording() -> bool:
    """Whether the calling thread records what it runs."""
    return _C._get_tracing_state() is not None


@contextmanager
def recording_paused() -> Iterator[Any]:
    """Record nothing inside the block; yields the tracer's state, None where there is none."""
    state = _C._get_tracing_state()
    _C._set_tracing_state(None)
    try:
        yield state
    finally:
        _C._set_tracing_state(state)


def traced_graph() -> Graph:
    """The graph being recorded; only while recording."""
    graph: Graph = _C._get_tracing_state().graph()
    return graph


def value_trace(tensor: torch.Tensor) -> Value:
    """The value that stands for a tensor in the graph being recorded; only while recording."""
    value: Value = _C._get_value_trace(tensor)
    return value
