"""compare_layers: a model under autocast against itself in float32, submodule by submodule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from amp_script.accuracy.advice import advise, inside
from amp_script.accuracy.difference import nonfinite
from amp_script.accuracy.report import LayerCall, LayerReport
from amp_script.accuracy.runs import Runs, SubmoduleCall
from amp_script.calls import Call, Inputs
from amp_script.errors import ComparisonError
from amp_script.float32_blocks import Float32Blocks
from amp_script.jit_state import jit_autocast_pass, shield
from amp_script.regions import Region
from amp_script.requirements import require_runnable
from amp_script.submodules import called_from_python

__all__ = ["compare_layers"]


def compare_layers(
    model: Callable[..., object],
    example_inputs: Inputs,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    keep_float32: Sequence[str] = (),
    advise: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> LayerReport:
    """Measure how far a model under autocast is from float32, in every call of a submodule.

    The model runs eagerly, as it does while ``trace_and_freeze`` traces it, once under autocast and
    once in float32. For each call of a submodule's ``forward``, the n-th call of one run with the
    n-th of the other, the report holds two differences: the accumulated one, of the outputs as they
    are, and the submodule's own, of what it makes of the same inputs. The first is large in all
    that follows a bad layer; the second in that layer, and in those around it.

    It then names what to keep in float32, and how far the model would be from float32 with it, for
    which it runs the model with this and that submodule kept: a few runs for each level of nesting.

    Measured are calls that Python makes. A ScriptModule is one block, and what is done by other
    methods than ``forward``, or with a submodule's weights alone, counts to the submodule around.

    In memory are, at most, the outputs of all calls in the dtypes that they have under autocast,
    and for each level of nesting the inputs and outputs of one call in float32. Every call runs up
    to twice more for each level that it is nested. Gradients are not recorded. The model, its
    buffers and the random generators are afterwards as before.

    Args:
        model: a module in evaluation mode, or a function that runs some.
        example_inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. An argument is a tensor or a nested structure of tensors.
        example_kwargs: keyword arguments beside positional ones.
        device_type: device type of the region, of the parameters and of the inputs.
        dtype: dtype of the region; the device's default where None.
        keep_float32: names or patterns of submodules to keep in float32 under autocast; see
            :func:`amp_script.keep_float32`.
        advise: find out what to keep in float32.
        progress: told what is done, how many steps of it are over, and of how many; 0 for a number
            that is not known.

    Raises:
        ComparisonError: the model fails in one of the runs, says in which submodule; has no
            submodules; or its results cannot be compared.
        SubmoduleError: a pattern in ``keep_float32`` keeps nothing, or what cannot be kept.
        TracingError: the model or an input cannot be run so; says what to change.
        StructureError: an input is no structure of tensors.
    """
    if not callable(model):
        raise ComparisonError(
            f"the model is a {type(model).__name__}: expected a module or a function"
        )
    region = Region.resolve(device_type, dtype)
    call = Call.bind(model, example_inputs, example_kwargs)
    require_runnable(model, call, region)
    kept = Float32Blocks.select(model, keep_float32)
    runs = Runs(model, call, region)
    if not runs.names:
        raise ComparisonError(
            "the function runs no module that can be seen from outside: expected one that it "
            "closes over, or whose method it is"
        )
    say = progress or _quiet
    with torch.inference_mode(False), torch.no_grad(), jit_autocast_pass(False), shield():
        return _compare(runs, kept, say, with_advice=advise)


def _quiet(what: str, done: int, total: int) -> None:
    return


def _compare(
    runs: Runs, kept: Float32Blocks, say: Callable[[str, int, int], None], *, with_advice: bool
) -> LayerReport:
    calls, output, full = runs.compared(
        kept, lambda done, total: say("comparing calls of submodules", done, total)
    )
    tried = Counter[str]()

    def after_run() -> None:
        tried["runs"] += 1
        say("running with submodules kept in float32", tried["runs"], 0)

    advice = advise(runs, kept, calls, output, full, after_run) if with_advice else None
    return LayerReport(
        dtype=runs.region.dtype,
        device=runs.region.device_type,
        keep_float32=kept.patterns,
        output=output,
        lost_in_float32=nonfinite(full.values()),
        calls=_layer_calls(runs, calls),
        advice=advice,
        not_called=_not_called(runs, calls),
    )


def _layer_calls(runs: Runs, calls: Sequence[SubmoduleCall]) -> tuple[LayerCall, ...]:
    place = {id(call): index for index, call in enumerate(calls)}
    counts = Counter(call.module for call in calls)
    explained = [inside(call) for call in calls]
    return tuple(
        LayerCall(
            name=runs.name(call.module),
            kind=type(call.module).__name__,
            call=call.index + 1,
            calls=counts[call.module],
            caller=None if call.caller is None else place[id(call.caller)],
            dtypes=tuple(dict.fromkeys(call.dtypes)),
            own=call.own,
            accumulated=call.accumulated,
            inside=None if part is None else place[id(part)],
            note=call.note,
        )
        for call, part in zip(calls, explained, strict=True)
    )


def _not_called(runs: Runs, calls: Sequence[SubmoduleCall]) -> tuple[str, ...]:
    """Names of modules with weights of their own and a ``forward``, which did not run."""
    called = {call.module for call in calls}
    observable = called_from_python(runs.model)
    return tuple(
        runs.name(module)
        for module in runs.names
        if module in observable - called
        and type(module).forward is not nn.Module.forward
        and any(True for _ in module.parameters(recurse=False))
    )
