"""Compares a program with eager autocast: bits, units in the last place, and distance to float32.

The reference runs three ways on the same inputs: under autocast, which is what the program should
be; without autocast, which is the float32 that both approximate; and the program itself runs three
times, because TorchScript's executor rewrites a graph between its first runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from amp_script.calls import Call
from amp_script.errors import VerificationError
from amp_script.frozen import FrozenModule
from amp_script.jit_state import shield
from amp_script.regions import Region, border_dtype
from amp_script.structure import flatten, leaves

__all__ = [
    "DISTANCE_RATIO",
    "RUNS",
    "OutputReport",
    "VerificationReport",
    "ulp_difference",
    "verify",
    "verify_call",
]

DISTANCE_RATIO: Final = 1.05
"""Largest distance to float32 that is accepted, as a multiple of eager autocast's."""

RUNS: Final = 3
"""How many times the program runs: the executor specialises in the first two."""


@dataclass(frozen=True)
class OutputReport:
    """One output tensor of the program against the same one of eager autocast.

    Attributes:
        path: the tensor's place, such as ``"output[0]"``.
        dtype: the program's dtype.
        expected_dtype: eager autocast's, after the cast to the border's dtype if one was asked for.
        shape: the program's sizes.
        expected_shape: eager autocast's.
        bit_equal: same dtype, shape and bits on every run.
        ulps: largest difference in units in the last place of the output's dtype; infinity where
            one is finite or a number and the other is not; None where dtype or shape differ.
        distance: norm of the program's difference to float32 over float32's norm; None for an
            output that is not floating point, or where float32 has no such output.
        eager_distance: the same for eager autocast; None also where eager autocast itself fails.
    """

    path: str
    dtype: torch.dtype
    expected_dtype: torch.dtype
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    bit_equal: bool
    ulps: float | None
    distance: float | None
    eager_distance: float | None

    @property
    def close(self) -> bool:
        """Whether the output is no further from float32 than eager autocast's, with 5% to spare."""
        if (self.dtype, self.shape) != (self.expected_dtype, self.expected_shape):
            return False
        if self.distance is None or self.eager_distance is None:
            return False
        return self.distance <= DISTANCE_RATIO * self.eager_distance


@dataclass(frozen=True)
class VerificationReport:
    """What a comparison found.

    Attributes:
        outputs: one report a tensor.
        exact: whether bit equality was asked for.
        note: what stood in the way of a full comparison, or ``""``.
    """

    outputs: tuple[OutputReport, ...]
    exact: bool
    note: str = ""

    @property
    def bit_equal(self) -> bool:
        """Whether every output equals eager autocast's to the bit."""
        return all(output.bit_equal for output in self.outputs)

    @property
    def accepted(self) -> bool:
        """Whether the program passes: bit-equal, or as near to float32 where that is enough."""
        return all(output.bit_equal or (not self.exact and output.close) for output in self.outputs)

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
        """One line a finding and one line an output."""
        if self.bit_equal:
            verdict = "equal to eager autocast to the bit"
        elif self.accepted:
            verdict = "as near to float32 as eager autocast"
        else:
            verdict = "differs from eager autocast"
        rows = [_HEADINGS, *(_row(output) for output in self.outputs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [verdict, *([self.note] if self.note else [])]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


def verify(
    module: FrozenModule,
    reference: Callable[..., object],
    inputs: object,
    *,
    kwargs: Mapping[str, object] | None = None,
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    exact: bool = False,
) -> VerificationReport:
    """Compare a frozen program with the model that it was made from.

    Args:
        module: what ``trace_and_freeze`` or ``load`` returned.
        reference: the model in evaluation mode, or the function.
        inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        kwargs: keyword arguments beside positional ones.
        dtype: the region's dtype, where the module's metadata names none.
        output_dtype: dtype of floating-point outputs that the program was asked for.
        exact: accept equal bits alone, not also a program that is as near to float32.

    Raises:
        VerificationError: an output is not accepted; holds the report.
        TracingError: the inputs do not fit the reference.
    """
    region = Region.resolve(module.metadata.device, dtype or module.metadata.dtype)
    call = Call.bind(reference, inputs, kwargs)
    return verify_call(module, reference, call, region, output_dtype=output_dtype, exact=exact)


def verify_call(
    program: FrozenModule,
    reference: Callable[..., object],
    call: Call,
    region: Region,
    *,
    output_dtype: torch.dtype | None,
    exact: bool,
) -> VerificationReport:
    """Run all three on one call and compare each output; see :func:`verify`."""
    specs = {spec.name: spec.dtype for spec in program.metadata.inputs}
    at_border = [
        tensor.to(specs.get(path) or tensor.dtype)
        for path, tensor in zip(call.paths, call.tensors, strict=True)
    ]
    # What the program sees after its border has rounded the inputs.
    inside = [a.to(tensor.dtype) for a, tensor in zip(at_border, call.tensors, strict=True)]

    def run(model: Callable[..., object], tensors: Sequence[torch.Tensor]) -> _Outputs:
        with _seeded(), torch.no_grad():
            found, structure = flatten(call.run(model, tensors), "output")
        return _Outputs([leaf.path for leaf in leaves(structure)], [t.clone() for t in found])

    with shield():
        with region.enter():
            expected = run(reference, inside)
        runs = [run(program, at_border) for _ in range(RUNS)]
        full = run(reference, inside)
    wanted = [tensor.to(border_dtype(tensor.dtype, output_dtype)) for tensor in expected.tensors]
    reports = [
        _compare_output(path, [each.tensors[index] for each in runs], wanted[index], float32)
        for index, (path, float32) in enumerate(zip(expected.paths, full.tensors, strict=True))
    ]
    report = VerificationReport(tuple(reports), exact)
    if not report.accepted:
        raise VerificationError(report)
    return report


class _Outputs(NamedTuple):
    paths: list[str]
    tensors: list[torch.Tensor]


def ulp_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference between two tensors in units in the last place.

    Args:
        a: any shape; floating point, complex, integer or bool.
        b: same shape and dtype.

    Returns:
        The number of representable values between the two, at most, over all elements; 0 for equal
        tensors. Both NaN counts as equal, one NaN as infinity. For integers the plain difference.
    """
    if a.numel() == 0:
        return 0.0
    if a.is_complex():
        return ulp_difference(torch.view_as_real(a), torch.view_as_real(b))
    if not a.is_floating_point():
        return float((a.double() - b.double()).abs().max())
    nan_a, nan_b = a.isnan(), b.isnan()
    if bool((nan_a != nan_b).any()):
        return math.inf
    steps = (_ordinal(a) - _ordinal(b)).abs().masked_fill(nan_a, 0)
    return float(steps.max())


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Number the values of a floating-point dtype in order: neighbours differ by one."""
    bits = x.contiguous().view(_INTEGERS[x.element_size()]).to(torch.int64)
    lowest = -(1 << (8 * x.element_size() - 1))
    return torch.where(bits < 0, lowest - bits, bits)


_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _compare_output(
    path: str, runs: Sequence[torch.Tensor], expected: torch.Tensor, full: torch.Tensor
) -> OutputReport:
    got = next((run for run in runs if not _same(run, expected)), runs[-1])
    alike = (got.dtype, got.shape) == (expected.dtype, expected.shape)
    return OutputReport(
        path=path,
        dtype=got.dtype,
        expected_dtype=expected.dtype,
        shape=tuple(got.shape),
        expected_shape=tuple(expected.shape),
        bit_equal=_same(got, expected),
        ulps=ulp_difference(got, expected) if alike else None,
        distance=_distance(got, full),
        eager_distance=_distance(expected, full),
    )


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))
        and bool(torch.equal(a.isnan(), b.isnan()))
    )


def _distance(x: torch.Tensor, full: torch.Tensor) -> float | None:
    if not x.is_floating_point() or x.shape != full.shape:
        return None
    finite = full.isfinite()
    reference = full.double()[finite]
    norm = float(reference.norm())
    difference = float((x.double()[finite] - reference).norm())
    return difference / norm if norm else difference


@contextmanager
def _seeded() -> Iterator[None]:
    """Draw the same random numbers in each run, and leave the generators as they were."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def _largest(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


_HEADINGS = ("output", "dtype", "shape", "bits", "ulps", "distance to float32", "eager autocast's")


def _row(output: OutputReport) -> tuple[str, ...]:
    dtype = str(output.dtype).removeprefix("torch.")
    if output.dtype != output.expected_dtype:
        dtype += f" (expected {str(output.expected_dtype).removeprefix('torch.')})"
    shape = "x".join(map(str, output.shape)) or "scalar"
    if output.shape != output.expected_shape:
        shape += f" (expected {'x'.join(map(str, output.expected_shape)) or 'scalar'})"
    return (
        output.path,
        dtype,
        shape,
        "equal" if output.bit_equal else "differ",
        "-" if output.ulps is None else f"{output.ulps:g}",
        "-" if output.distance is None else f"{output.distance:.3e}",
        "-" if output.eager_distance is None else f"{output.eager_distance:.3e}",
    )
