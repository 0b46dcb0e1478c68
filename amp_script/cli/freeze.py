"""``amp-script freeze``: a model in, a mixed-precision file out.

A frozen TorchScript program, or with ``--format export`` what torch.export makes of the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple, TypeAlias, TypedDict

import torch
import typer

import amp_script
from amp_script.cli import output, targets
from amp_script.cli.files import require_free
from amp_script.cli.inputs import (
    BORDER_DTYPES,
    DTYPES,
    choice,
    device_of,
    example_inputs,
    moved,
)
from amp_script.cli.options import (
    BorderDtype,
    Force,
    InputSpecs,
    InputsTarget,
    KeptPatterns,
    RegionDtype,
    Target,
)
from amp_script.cli.targets import ExampleInputs
from amp_script.dtypes import dtype_name
from amp_script.errors import AmpScriptError, SubmoduleError, UsageError, VerificationError
from amp_script.exporting import inputs_of, save_exported
from amp_script.frozen import FrozenModule
from amp_script.metadata import InputSpec, Verification
from amp_script.regions import Region
from amp_script.verification import VerificationReport


def command(
    target: Target,
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")
    ],
    input_specs: InputSpecs = None,
    inputs_target: InputsTarget = None,
    check_targets: Annotated[
        list[str] | None,
        typer.Option(
            "--check-inputs",
            metavar="MODULE:ATTR",
            help="More inputs, in other sizes, once for each: the file has to do as the model does "
            "on them, and their sizes are known to vary.",
        ),
    ] = None,
    dtype: RegionDtype = None,
    output_dtype: BorderDtype = None,
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="Where the model will run, such as `cpu` or `cuda`."),
    ] = "cpu",
    keep_float32: KeptPatterns = None,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="`torchscript`, or `export` for a `.pt2` file that `torch.export.load` and "
            "AOTInductor read.",
        ),
    ] = "torchscript",
    force: Force = False,
) -> None:
    """Freeze a model to a mixed-precision file that is eager autocast to the bit.

    The model is traced under autocast, frozen, compared with eager autocast on the example inputs,
    and written with the weights that autocast casts in the lower precision. Plain `torch.jit.load`
    and libtorch read the file.

    With `--format export` the model goes through `torch.export` instead, with the region in the
    program and the weights as they are, and is compared in the same way.

    Example: `amp-script freeze models.py:resnet -o resnet.pt --input 1x3x224x224`
    """
    started = time.perf_counter()
    write = choice("--format", file_format, FORMATS)
    if file_format == "export" and file.suffix != ".pt2":
        raise UsageError(f"{file}: expected a name that ends in .pt2, which torch.export asks for")
    require_free(file, force)
    region_dtype = None if dtype is None else choice("--dtype", dtype, DTYPES)
    border = None if output_dtype is None else choice("--output-dtype", output_dtype, BORDER_DTYPES)
    place = device_of(device)
    make_inputs = example_inputs(input_specs or [], inputs_target)
    with output.step(f"loading {target}"):
        model = targets.load_model(target).to(place)
        inputs, kwargs = moved(make_inputs(), place)
        checks = [moved(targets.load_inputs(text), place) for text in check_targets or []]
    options: Options = {
        "example_kwargs": kwargs,
        "device_type": place.type,
        "dtype": region_dtype,
        "output_dtype": border,
        "keep_float32": keep_float32 or [],
        "check_inputs": checks,
    }
    try:
        rows = list(write(Request(model, inputs, options), file))
    except SubmoduleError as error:
        raise UsageError(f"--keep-float32 {error.pattern}: {error.reason}") from error
    except VerificationError as error:
        reason = f"{_difference(error.report)}{error.explanation}"
        raise AmpScriptError(f"{target}: {reason}") from error
    size = output.size(file.stat().st_size)
    output.table(
        [
            ("file", str(file)),
            ("size", f"{size}, of a model with {output.size(_weight_bytes(model))} of weights"),
            *rows,
            ("took", f"{time.perf_counter() - started:.1f} s"),
        ]
    )


class Options(TypedDict):
    """What :func:`amp_script.trace_and_freeze` and :func:`amp_script.export` both take."""

    example_kwargs: dict[str, object]
    device_type: str
    dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    keep_float32: Sequence[str]
    check_inputs: Sequence[ExampleInputs]


class Request(NamedTuple):
    """What was asked for."""

    model: torch.nn.Module
    inputs: ExampleInputs
    options: Options


Rows: TypeAlias = "Iterator[tuple[str, str]]"


def _torchscript(request: Request, file: Path) -> Rows:
    """Write a frozen TorchScript program, and tell what it is."""
    with output.step("tracing under autocast, freezing, comparing with eager autocast"):
        frozen = amp_script.trace_and_freeze(request.model, request.inputs, **request.options)
    with output.step(f"writing {file}"):
        amp_script.save(frozen, file)
    yield from _summary(frozen)


def _export(request: Request, file: Path) -> Rows:
    """Write an exported program, and tell what it is."""
    with output.step("exporting under autocast, comparing with eager autocast"):
        program = amp_script.export(request.model, request.inputs, **request.options)
    with output.step(f"writing {file}"):
        save_exported(program, file)
    options = request.options
    region = Region.resolve(options["device_type"], options["dtype"])
    yield "region", f"{dtype_name(region.dtype)} on {region.device_type}, in the program"
    if options["keep_float32"]:
        yield "in float32", ", ".join(map(repr, options["keep_float32"]))
    yield from _inputs(inputs_of(program))
    yield "verified", "equal to eager autocast to the bit"


FORMATS: Final = {"torchscript": _torchscript, "export": _export}


def _weight_bytes(model: torch.nn.Module) -> int:
    """Bytes that the parameters and buffers take, each counted once."""
    return sum(
        tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers())
    )


def _difference(report: VerificationReport) -> str:
    """What a report found, in one line, with the first output that does not pass."""
    verdict = str(report).partition("\n")[0]
    failing = next(item for item in report.outputs if not item.accepted)
    found = _tensor(failing.dtype, failing.shape)
    if failing.ulps is not None:
        return f"{verdict}: {found}, up to {failing.ulps:g} units in the last place apart"
    if failing.expected_dtype is None:
        return f"{verdict}: {found}, {_distance(failing.distance)} from float32"
    return f"{verdict}: {found}, not {_tensor(failing.expected_dtype, failing.expected_shape)}"


def _summary(frozen: FrozenModule) -> Rows:
    about = frozen.metadata
    yield "region", f"{dtype_name(about.dtype)} on {about.device}, {about.compute} kernels"
    if about.keep_float32:
        yield "in float32", ", ".join(map(repr, about.keep_float32))
    yield from _inputs(about.inputs)
    if about.verification is not None:
        yield "verified", _verdict(about.verification)


def _inputs(specs: Iterable[InputSpec]) -> Rows:
    for spec in specs:
        what = "no tensor" if spec.dtype is None else _tensor(spec.dtype, spec.shape)
        yield f"input {spec.name}", what


def _verdict(found: Verification) -> str:
    if found.bit_equal:
        return "equal to eager autocast to the bit"
    if found.eager_distance is None:
        return f"{_distance(found.distance)} from float32; eager autocast itself fails"
    return (
        f"{_distance(found.distance)} from float32, eager autocast "
        f"{_distance(found.eager_distance)}"
    )


def _distance(relative: float | None) -> str:
    return "an unknown distance" if relative is None else f"{100 * relative:.2g}%"


def _tensor(dtype: torch.dtype | None, shape: Sequence[int | None] | None) -> str:
    if shape is None:
        return dtype_name(dtype)
    sizes = "x".join("?" if size is None else str(size) for size in shape)
    return f"{dtype_name(dtype)} {sizes or 'scalar'}"
