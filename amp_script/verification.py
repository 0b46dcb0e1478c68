"""Compares a program with eager autocast: bits, units in the last place, and distance to float32.

The reference runs two ways on the same inputs: under autocast, which is what the program should be,
and without, its own regions off too, which is the float32 that both approximate. The program runs
three times, because TorchScript's executor rewrites a graph between its first runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import nn

from amp_script.autocast_mode import autocast
from amp_script.calls import Call, Inputs
from amp_script.dtypes import dtype_name
from amp_script.errors import AmpScriptError, VerificationError
from amp_script.float32_blocks import Float32Blocks
from amp_script.frozen import FrozenModule
from amp_script.gist import first_line
from amp_script.interception import replaced
from amp_script.jit_state import jit_autocast_pass, shield
from amp_script.metadata import Metadata
from amp_script.regions import Region, border_dtype
from amp_script.scripting import LoweredFunction, LoweredModule
from amp_script.scripting.script_calls import lowered_script_calls
from amp_script.structure import Structure, flatten, named_leaves
from amp_script.tables import Table
from amp_script.untouched import State, modules_of, seeded, untouched

__all__ = [
    "DISTANCE_IN_EPS",
    "DISTANCE_RATIO",
    "RUNS",
    "Expectation",
    "OutputReport",
    "VerificationReport",
    "expect",
    "judge",
    "ulp_difference",
    "verify",
]

DISTANCE_RATIO: Final = 1.05
"""Largest distance to float32 that is accepted, as a multiple of eager autocast's."""

DEVIATIONS: Final = 4
"""How many standard deviations more are accepted of a program that runs other kernels."""

DISTANCE_IN_EPS: Final = 8
"""The same in the region dtype's machine epsilon, where eager autocast does not run at all."""

RUNS: Final = 3
"""How many times the program runs: the executor specialises in the first two."""


@dataclass(frozen=True)
class OutputReport:
    """One output of the program against the same one of eager autocast.

    Attributes:
        path: the output's place, such as ``"output[0]"``.
        dtype: the program's dtype.
        expected_dtype: eager autocast's, after the cast to the border's dtype if one was asked for;
            None where eager autocast itself fails.
        shape: the program's sizes.
        expected_shape: eager autocast's, or None.
        bit_equal: same dtype, shape and bits on every run.
        ulps: largest difference in units in the last place of the output's dtype; infinity where
            one is a number and the other is not; None where the two cannot be compared.
        distance: norm of the program's difference to float32 over float32's norm; for integers the
            share of elements that differ; None where float32 has no such output.
        eager_distance: the same for eager autocast.
        limit: the largest distance that is accepted where the bits differ; None where none is.
    """

    path: str
    dtype: torch.dtype
    expected_dtype: torch.dtype | None
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...] | None
    bit_equal: bool
    ulps: float | None
    distance: float | None
    eager_distance: float | None
    limit: float | None

    @property
    def accepted(self) -> bool:
        """Whether the output passes: equal bits, or a distance within the limit."""
        if self.bit_equal:
            return True
        return self.distance is not None and self.limit is not None and self.distance <= self.limit


@dataclass(frozen=True)
class VerificationReport:
    """What a comparison found.

    Attributes:
        outputs: one report an output.
        note: what stood in the way of a full comparison, or ``""``.
        call: which inputs it was, such as ``"example_inputs"``.
    """

    outputs: tuple[OutputReport, ...]
    note: str = ""
    call: str = ""

    @property
    def bit_equal(self) -> bool:
        """Whether every output equals eager autocast's to the bit."""
        return all(output.bit_equal for output in self.outputs)

    @property
    def accepted(self) -> bool:
        """Whether every output passes."""
        return all(output.accepted for output in self.outputs)

    @property
    def ulps(self) -> float | None:
        """Largest difference over all outputs, in units in the last place."""
        return _largest(output.ulps for output in self.outputs)

    @property
    def distance(self) -> float | None:
        """Largest relative distance to float32 over all outputs."""
        return _largest(output.distance for output in self.outputs)

    @property
    def eager_distance(self) -> float | None:
        """Eager autocast's largest relative distance to float32."""
        return _largest(output.eager_distance for output in self.outputs)

    def __str__(self) -> str:
        """The verdict, and one line an output."""
        if self.bit_equal:
            verdict = "equal to eager autocast to the bit"
        elif not self.accepted:
            failing = ", ".join(output.path for output in self.outputs if not output.accepted)
            verdict = f"differs from eager autocast in {failing}"
        elif self.eager_distance is None:
            verdict = "near to float32"
        else:
            verdict = "as near to float32 as eager autocast"
        if self.call:
            verdict = f"{self.call}: {verdict}"
        table = Table("", _HEADINGS, [_row(output) for output in self.outputs], numbers=3)
        return "\n".join([verdict, *([self.note] if self.note else []), str(table)])


def verify(
    module: Callable[..., object],
    reference: Callable[..., object],
    inputs: Inputs,
    *,
    kwargs: Mapping[str, object] | None = None,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    exact: bool = False,
) -> VerificationReport:
    """Compare a program with the model that it was made from.

    An output passes if its bits are eager autocast's or, unless ``exact``, if its distance to
    float32 is at most 1.05 times eager autocast's; under a plan other than native, outputs of few
    numbers may be further by what chance makes of two programs that are equally good. Submodules
    that were kept in float32 when a frozen program was made are kept in the reference too.

    Args:
        module: what ``trace_and_freeze``, ``load`` or ``script`` returned, or another ScriptModule.
            What ``script`` returned follows the region; the others run outside of it.
        reference: the model in evaluation mode, or the function.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        kwargs: keyword arguments beside positional ones.
        device_type: device type of the region; a frozen module's own, or ``"cpu"``, where None.
        dtype: dtype of the region; a frozen module's own, or the device's default, where None.
        output_dtype: dtype of floating-point outputs that the program was asked for.
        exact: accept equal bits alone.

    Raises:
        VerificationError: an output does not pass; holds the report.
        TracingError: the inputs do not fit the reference.
        SubmoduleError: the reference lacks the submodules that were kept in float32.
    """
    metadata = (
        module.metadata if isinstance(module, FrozenModule) else Metadata("scripted", None, "cpu")
    )
    region = Region.resolve(device_type or metadata.device, dtype or metadata.dtype)
    call = Call.bind(reference, inputs, kwargs)
    at_border = call.at_border({spec.name: spec.dtype for spec in metadata.inputs})
    kept = Float32Blocks.select(reference, metadata.keep_float32)
    with torch.no_grad(), jit_autocast_pass(False), shield(), kept.enter():
        expectation = expect(reference, call.rounded_by(at_border), region)
        return judge(module, at_border, expectation, output_dtype=output_dtype, exact=exact)


_Outputs: TypeAlias = "dict[str, torch.Tensor]"


@dataclass(frozen=True)
class Expectation:
    """What a reference gives for one call.

    Attributes:
        region: the region that it ran in.
        structure: of the result.
        runs: outputs under autocast of one run, or of :data:`RUNS` where the model keeps state;
            empty where eager autocast itself fails.
        full: the same in float32; empty where the model does not run in float32.
        note: what failed, or ``""``.
        rebound: the model's attributes that hold other objects after a run than before it.
    """

    region: Region
    structure: Structure
    runs: list[_Outputs]
    full: list[_Outputs]
    note: str = ""
    rebound: tuple[str, ...] = ()

    def run(self, index: int) -> _Outputs | None:
        """What eager autocast gives on the run of this number."""
        return self.runs[index % len(self.runs)] if self.runs else None

    def run_in_float32(self, index: int) -> _Outputs | None:
        """What the model gives in float32 on the run of this number."""
        return self.full[index % len(self.full)] if self.full else None


def expect(reference: Callable[..., object], call: Call, region: Region) -> Expectation:
    """Run a reference under autocast and in float32, in the calling thread's gradient mode.

    The model's state and the random generators are as before afterwards; every run draws the same
    random numbers.

    Raises:
        AmpScriptError: the model cannot be followed under autocast, or its result not taken apart.
        Exception: what the model raises under autocast, where it does not run in float32 either.
    """
    modules = modules_of(reference)
    runs: list[_Result] = []
    full: list[_Result] = []
    rebound: list[str] = []
    failures: list[Exception] = []
    with lowered_script_calls(), untouched(modules) as state:
        try:
            with region.enter(cached=True):
                runs = _results(reference, call, region, state)
            rebound = state.rebound_names()
        except AmpScriptError:
            raise
        except Exception as error:  # of the user's code, or of torch's
            failures.append(error)
    with lowered_script_calls(), untouched(modules) as state, _own_regions_off():
        try:
            full = _results(reference, call.in_float32(), region, state)
        except Exception as error:  # likewise
            if not runs:
                raise failures[0] from None
            failures.append(error)
    what = "the model does not run in float32" if runs else "eager autocast itself fails"
    return Expectation(
        region,
        (runs or full)[0].structure,
        [run.outputs for run in runs],
        [run.outputs for run in full],
        f"{what}: {first_line(failures[0])}" if failures else "",
        tuple(rebound),
    )


@contextmanager
def _own_regions_off() -> Iterator[None]:
    """Let the regions that Python enters in the calling thread cast nothing."""
    with (
        replaced(torch.amp.autocast_mode.autocast, "__enter__", _enter_off),
        replaced(autocast, "__enter__", _enter_off),
    ):
        yield


def _enter_off(enter: Callable[..., object], region: torch.autocast) -> object:
    entered = enter(region)
    torch.set_autocast_enabled(region.device, False)
    return entered


def judge(
    program: Callable[..., object],
    call: Call,
    expectation: Expectation,
    *,
    output_dtype: torch.dtype | None,
    exact: bool,
    name: str = "",
) -> VerificationReport:
    """Run a program and compare it with what was expected of it.

    Args:
        program: the program; a state that it keeps is as before afterwards.
        call: its inputs, in the dtypes of its border.
        expectation: what the reference gives.
        output_dtype: dtype of floating-point outputs that the program was asked for.
        exact: accept equal bits alone.
        name: which call it is, for the report.

    Raises:
        VerificationError: an output does not pass; holds the report.
    """
    own_state = copy.deepcopy(program) if isinstance(program, nn.Module) else program
    follows = isinstance(program, (LoweredModule, LoweredFunction))
    with expectation.region.enter() if follows else nullcontext():
        runs = [_outputs(_run(own_state, call, expectation.region)) for _ in range(RUNS)]
    other_kernels = isinstance(program, FrozenModule) and program.compute != "native"
    deviations = DEVIATIONS if other_kernels else 0
    reports = tuple(
        _report(
            path, runs, expectation, output_dtype=output_dtype, exact=exact, deviations=deviations
        )
        for path in runs[0]
    )
    report = VerificationReport(reports, expectation.note, name)
    if not report.accepted:
        explanation = _what_changes(expectation.rebound)
        if other_kernels and expectation.full and not exact:
            explanation += _OTHER_KERNELS
        if expectation.runs and not expectation.full and not exact:
            explanation += _NO_DISTANCE
        raise VerificationError(report, explanation)
    return report


_OTHER_KERNELS: Final = (
    "\nthe program runs other kernels than eager autocast: example inputs of more rows tell an "
    'error from chance, and compute="native" runs the same kernels'
)

_NO_DISTANCE: Final = (
    "\nwithout float32 there is no distance to measure, and equal bits alone pass, which a program "
    "with other kernels than eager autocast's or with folded batch norm may not have: freeze with "
    'compute="native" and fold_batch_norm=False, or have the model run in float32 where autocast '
    "is off"
)


def _what_changes(rebound: Sequence[str]) -> str:
    if not rebound:
        return ""
    return (
        f"\nthe model changes its own {', '.join(rebound)} when it runs, and a trace holds fast "
        "what it was: keep such state in a buffer that is changed in place, or have forward take "
        "and return it"
    )


def ulp_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference between two tensors in units in the last place.

    Args:
        a: any shape; floating point, complex, integer or bool.
        b: same shape and dtype.

    Returns:
        How many steps from one representable value to the next lie between the two, at most, over
        all elements; 0 for equal tensors, for both signs of zero and for two NaN, infinity for one
        NaN. For integers the plain difference.
    """
    if a.numel() == 0:
        return 0.0
    if a.is_complex():
        return ulp_difference(torch.view_as_real(a), torch.view_as_real(b))
    if not a.is_floating_point():
        return float((a.double() - b.double()).abs().max())
    nan_a, nan_b = _computable(a).isnan(), _computable(b).isnan()
    if not torch.equal(nan_a, nan_b):
        return math.inf
    steps = (_ordinal(a) - _ordinal(b)).abs().masked_fill(nan_a, 0)
    return float(steps.max())


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Number the values of a floating-point dtype in order: neighbours differ by one."""
    bits = x.contiguous().view(_INTEGERS[x.element_size()]).to(torch.int64)
    lowest = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _run(model: Callable[..., object], call: Call, region: Region) -> object:
    with seeded(region.device_type):
        return call.run(model, call.fresh())


class _Result(NamedTuple):
    """What one run gives, taken before a later one changes a tensor that the model still holds."""

    outputs: _Outputs
    structure: Structure


def _results(
    reference: Callable[..., object], call: Call, region: Region, state: State
) -> list[_Result]:
    """One run, or :data:`RUNS` where the model keeps state."""

    def result() -> _Result:
        value = _run(reference, call, region)
        _, structure = flatten(value, "output")
        return _Result(_outputs(value), structure)

    first = result()
    return [first, *(result() for _ in range(RUNS - 1))] if state.changed() else [first]


def _outputs(value: object) -> _Outputs:
    """The tensors and numbers of a result by path, as tensors that no later run can change."""
    return {
        path: _dense(torch.as_tensor(leaf).detach()).clone()
        for path, leaf in named_leaves("output", value)
        if isinstance(leaf, (torch.Tensor, int, float))
    }


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse, quantized or nested tensor in one that torch compares."""
    if tensor.is_nested:
        padded: torch.Tensor = torch.nested.to_padded_tensor(tensor, 0.0)
        return padded
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _report(
    path: str,
    runs: Sequence[_Outputs],
    expectation: Expectation,
    *,
    output_dtype: torch.dtype | None,
    exact: bool,
    deviations: int,
) -> OutputReport:
    pairs = [
        (run[path], _wanted(expectation.run(i), path, output_dtype)) for i, run in enumerate(runs)
    ]
    index = next((i for i, pair in enumerate(pairs) if not _same(*pair)), len(pairs) - 1)
    got, wanted = pairs[index]
    full = (expectation.run_in_float32(index) or {}).get(path)
    alike = wanted is not None and (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    eager_distance = None if wanted is None else _distance(wanted, full)
    eps = torch.finfo(expectation.region.dtype).eps
    if wanted is None:
        limit = DISTANCE_IN_EPS * eps
    elif alike and not exact and eager_distance is not None:
        limit = DISTANCE_RATIO * eager_distance
        if deviations and wanted.is_floating_point() and wanted.numel():
            # Of two kernels that round equally often, each is nearer now and then. The logarithm of
            # the ratio of two norms of n independent errors deviates by about 1/√n. A distance
            # below that of float32 rounded once, a quarter of the dtype's epsilon, is chance too.
            chance = math.exp(deviations / math.sqrt(wanted.numel())) - 1
            limit += chance * max(eager_distance, eps / 4)
    else:
        limit = None
    return OutputReport(
        path=path,
        dtype=got.dtype,
        expected_dtype=None if wanted is None else wanted.dtype,
        shape=tuple(got.shape),
        expected_shape=None if wanted is None else tuple(wanted.shape),
        bit_equal=_same(got, wanted),
        ulps=ulp_difference(got, wanted) if alike and wanted is not None else None,
        distance=_distance(got, full),
        eager_distance=eager_distance,
        limit=limit,
    )


def _wanted(
    run: _Outputs | None, path: str, output_dtype: torch.dtype | None
) -> torch.Tensor | None:
    """Eager autocast's output, cast at the border as the program's is."""
    if run is None or path not in run:
        return None
    return run[path].to(border_dtype(run[path].dtype, output_dtype))


def _same(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    a, b = _computable(a), _computable(b)
    return bool(torch.equal(a, b)) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _computable(x: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype that torch computes with: it only stores floats of eight bits."""
    return x.float() if x.is_floating_point() and x.element_size() == 1 else x


def _distance(x: torch.Tensor, full: torch.Tensor | None) -> float | None:
    if full is None or x.shape != full.shape:
        return None
    x, full = _computable(x), _computable(full)
    if not full.is_floating_point():
        return float((x != full).double().mean()) if full.numel() else 0.0
    finite = full.isfinite()
    reference = full[finite].double()
    norm = float(reference.norm())
    difference = float((x[finite].double() - reference).norm())
    return difference / norm if norm else difference


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


_HEADINGS = ("output", "dtype", "shape", "bits", "ulps", "distance to float32", "eager autocast's")


def _row(output: OutputReport) -> tuple[str, ...]:
    dtype = _expected(dtype_name(output.dtype, ""), dtype_name(output.expected_dtype, ""))
    shape = _expected(_sizes(output.shape), _sizes(output.expected_shape))
    bits = "equal" if output.bit_equal else "differ"
    distances = [
        "-" if value is None else f"{value:.3e}"
        for value in (output.distance, output.eager_distance)
    ]
    return (output.path, dtype, shape, bits, _number(output.ulps), *distances)


def _expected(found: str, wanted: str) -> str:
    return found if wanted in (found, "") else f"{found} (expected {wanted})"


def _sizes(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "x".join(map(str, shape)) or "scalar"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
