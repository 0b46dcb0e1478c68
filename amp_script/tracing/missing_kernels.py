"""Recording an operator that this processor cannot run in lower precision.

oneDNN has LSTM kernels for bfloat16 and float16 only where the processor has the instructions;
elsewhere an LSTM under autocast raises, in eager mode and while tracing. The recorded program can
still run, by a compute plan or on another machine. So the operator is recorded as it is called, and
its results are worked out in float32 from the rounded values, for the rest of the recording to go
on with.

Private names used here, present in torch 2.6 to 2.15: ``torch._VF``, the
tracing state's ``graph``, ``torch._C._set_value_trace``, ``torch._C.ListType.ofTensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from amp_script.interception import replaced
from amp_script.jit_state import shield
from amp_script.lowering._graph import Value
from amp_script.regions import Region
from amp_script.tracer import recording_paused, value_trace

__all__ = ["stand_in_for_missing_kernels"]

_C: Any = torch._C  # torch's stubs lack what tracing uses


@contextmanager
def stand_in_for_missing_kernels(region: Region) -> Iterator[None]:
    """Let the calling thread run and record ``nn.LSTM`` layers that this processor cannot run."""
    with replaced(torch._VF, "lstm", partial(_lstm, region.dtype)):
        yield


def _lstm(dtype: torch.dtype, original: Callable[..., Any], *args: Any) -> Any:
    """Stand for the function that ``nn.LSTM`` calls."""
    with recording_paused() as state:
        results = _results(dtype, original, args)
    if results is None:
        return original(*args)
    if state is not None:
        _record("aten::lstm", state.graph(), args, results)
    return results


def _results(
    dtype: torch.dtype, original: Callable[..., Any], args: Sequence[Any]
) -> tuple[torch.Tensor, ...] | None:
    """What the operator would give; None where it runs."""
    try:
        original(*args)
    except RuntimeError as error:
        if "primitive" not in str(error):
            raise
    else:
        return None
    with shield(), torch.no_grad():
        rounded = [_each(arg, lambda t: t.to(dtype).float()) for arg in args]
        return tuple(result.to(dtype) for result in original(*rounded))


def _each(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return type(value)(_each(item, change) for item in value)
    return value


def _record(kind: str, graph: Any, args: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
    """Put a node into the graph being recorded, and let the results be what it gives."""
    node = graph.insertNode(graph.create(kind, [_value(graph, arg) for arg in args], len(results)))
    for output, result in zip(node.outputs(), results, strict=True):
        output.inferTypeFrom(result)
        _C._set_value_trace(result, output)


def _value(graph: Any, arg: Any) -> Value:
    if isinstance(arg, torch.Tensor):
        return value_trace(arg)
    if isinstance(arg, (tuple, list)):
        parts = [value_trace(item) for item in arg]
        holder = graph.insertNode(graph.create("prim::ListConstruct", parts, 1))
        holder.output().setType(_C.ListType.ofTensors())
        value: Value = holder.output()
    else:
        value = graph.insertConstant(arg)
    return value
