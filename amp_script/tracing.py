"""trace_and_freeze: a model as a frozen TorchScript program that is eager autocast to the bit.

Steps: take the example inputs apart; trace the model under autocast, so that casts become nodes
and Python's branches on dtypes and nested regions are taken as in eager mode; give the trace a
``forward`` with the model's own argument names and result; freeze; verify.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._trace.make_module``,
``torch.jit._trace.TopLevelTracedModule``, ``torch.jit._state._python_cu``, the C++ module's
``_create_method_from_trace`` and ``_define``, ``torch._C._freeze_module``.
"""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch.jit._recursive import wrap_cpp_module
from torch.jit._state import _python_cu
from torch.jit._trace import TopLevelTracedModule, TracerWarning, make_module

from amp_script.calls import Call
from amp_script.errors import TracingError, TracingWarning
from amp_script.frozen import FrozenModule
from amp_script.jit_state import jit_autocast_pass, shield
from amp_script.metadata import InputSpec, Metadata, Verification
from amp_script.regions import Region, border_dtype
from amp_script.structure import (
    Structure,
    flatten,
    forward_source,
)
from amp_script.verification import VerificationReport, verify_call

__all__ = ["trace_and_freeze"]

_TRACED = "traced_"


def trace_and_freeze(
    model: nn.Module | Callable[..., object],
    example_inputs: object,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    compute: Literal["auto", "native", "upcast"] = "auto",
    fold_batch_norm: bool = True,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    preserved_attrs: Sequence[str] = (),
    check_inputs: Iterable[object] = (),
    verify: bool = True,
) -> FrozenModule:
    """Trace a model under autocast and freeze it.

    Args:
        model: a module in evaluation mode, or a function.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword
            arguments; each may be nested. Values that are no tensors are held fast.
        example_kwargs: keyword arguments beside positional ones.
        device_type: device type of the region, of the parameters and of the inputs.
        dtype: dtype of the region; the device's default where None.
        compute: which kernels the program uses.
        fold_batch_norm: fold batch norm into the layer before it, in float32 before rounding.
        input_dtype: dtype of floating-point inputs at the program's border; the examples' where
            None.
        output_dtype: dtype of floating-point outputs at the border; eager autocast's where None.
        preserved_attrs: attributes and methods of the model that stay on the frozen module.
        check_inputs: more inputs, in other shapes, on which the program must equal the model.
        verify: compare the program with eager autocast on ``example_inputs``.

    Raises:
        TracingError: the model or an input cannot be traced exactly; says what to change.
        StructureError: an input or output is no structure of tensors.
        VerificationError: the program is not what eager autocast is.
    """
    region = Region.resolve(device_type, dtype)
    _require_evaluation(model)
    _require_device(_named_tensors(model), device_type, "move the model with model.to")
    call = Call.bind(model, example_inputs, example_kwargs)
    if not call.tensors:
        raise TracingError(
            "no tensor among the example inputs: a trace needs at least one; pass "
            "trace_and_freeze(model, (tensor, ...))"
        )
    _require_device(zip(call.paths, call.tensors, strict=True), device_type, "move it with .to")
    with jit_autocast_pass(False), shield():
        traced = _trace(model, call, region)
        input_dtypes = [border_dtype(tensor.dtype, input_dtype) for tensor in call.tensors]
        _define_forward(traced, call, input_dtypes, output_dtype)
        frozen = _freeze(traced.module, preserved_attrs)
        specs = tuple(
            replace(InputSpec.of_tensor(path, tensor), dtype=at_border)
            for path, tensor, at_border in zip(call.paths, call.tensors, input_dtypes, strict=True)
        )
        metadata = Metadata("frozen", region.dtype, device_type, specs)
        program = FrozenModule.wrap(frozen, metadata)
        for inputs in check_inputs:
            other = Call.bind(model, inputs)
            verify_call(program, model, other, region, exact=True, output_dtype=output_dtype)
        if not verify:
            return program
        report = verify_call(program, model, call, region, exact=True, output_dtype=output_dtype)
        return FrozenModule.wrap(program, replace(metadata, verification=_summary(report)))


def _require_evaluation(model: object) -> None:
    if not isinstance(model, nn.Module):
        return
    training = [
        name or type(model).__name__ for name, part in model.named_modules() if part.training
    ]
    if training:
        shown = ", ".join(training[:3]) + (", ..." if len(training) > 3 else "")
        raise TracingError(f"the model is in training mode ({shown}); call model.eval() first")


def _named_tensors(model: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, nn.Module):
        yield from model.named_parameters()
        yield from model.named_buffers()


def _require_device(
    tensors: Iterable[tuple[str, torch.Tensor]], device_type: str, how: str
) -> None:
    for name, tensor in tensors:
        if tensor.device.type != device_type:
            raise TracingError(
                f"{name} is on {str(tensor.device)!r}, and the region is on {device_type!r}; "
                f"{how}({device_type!r}), or pass device_type={tensor.device.type!r}"
            )


# --- trace ----------------------------------------------------------------------------------------


class _FunctionHolder(nn.Module):
    """Stands for a plain function: what the traced method hangs on."""


@dataclass
class _Traced:
    module: torch.jit.ScriptModule
    result: Structure
    dtypes: list[torch.dtype]


def _trace(model: Callable[..., object], call: Call, region: Region) -> _Traced:
    holder = model if isinstance(model, nn.Module) else _FunctionHolder().eval()
    module = make_module(holder, TopLevelTracedModule, _python_cu)  # type: ignore[no-untyped-call]
    found: list[tuple[Structure, list[torch.dtype]]] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, structure = flatten(call.run(model, tensors), "output")
        found.append((structure, [output.dtype for output in outputs]))
        return tuple(outputs)

    with torch.no_grad(), region.enter(), _tracer_warnings():
        module._c._create_method_from_trace(
            _TRACED, run, tuple(call.tensors), lambda value: "", True, False, [], False
        )
    structure, dtypes = found[-1]
    if not dtypes:
        raise TracingError("the model returned no tensor")
    return _Traced(module, structure, dtypes)


@contextmanager
def _tracer_warnings() -> Iterator[None]:
    """Replace the tracer's warnings by one of ours that shows the lines they come from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TracerWarning)
        yield
    lines = []
    for warning in caught:
        if issubclass(warning.category, TracerWarning):
            text = linecache.getline(warning.filename, warning.lineno).strip()
            lines.append(f"  {warning.filename}:{warning.lineno}: {text}")
        else:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if lines:
        warnings.warn(
            "tracing held fast what these lines computed from the example inputs:\n"
            + "\n".join(dict.fromkeys(lines)),
            TracingWarning,
            stacklevel=5,
        )


def _define_forward(
    traced: _Traced,
    call: Call,
    input_dtypes: Sequence[torch.dtype],
    output_dtype: torch.dtype | None,
) -> None:
    forward = forward_source(
        call.parameters,
        traced.result,
        _TRACED,
        [
            tensor.dtype if tensor.dtype != at_border else None
            for tensor, at_border in zip(call.tensors, input_dtypes, strict=True)
        ],
        [
            at_border if at_border != dtype else None
            for dtype in traced.dtypes
            for at_border in [border_dtype(dtype, output_dtype)]
        ],
    )
    concrete_type = traced.module._concrete_type
    traced.module._c._define(concrete_type, forward.source, forward.names.get)


def _freeze(module: torch.jit.ScriptModule, preserved: Sequence[str]) -> torch.jit.ScriptModule:
    cpp_module = torch._C._freeze_module(module._c, list(preserved))
    frozen: torch.jit.ScriptModule
    frozen = wrap_cpp_module(cpp_module)  # type: ignore[no-untyped-call]  # torch's own
    return frozen


def _summary(report: VerificationReport) -> Verification:
    return Verification(report.bit_equal, report.ulps, report.distance, report.eager_distance)
