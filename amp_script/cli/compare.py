"""``amp-script compare``: how far a model under autocast is from float32, layer by layer."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import amp_script
from amp_script.accuracy import LayerCall, LayerReport
from amp_script.cli import output, targets
from amp_script.cli.files import require_free, require_plots
from amp_script.cli.inputs import DTYPES, choice, device_of, example_inputs, moved
from amp_script.cli.options import (
    AsJson,
    InputSpecs,
    InputsTarget,
    KeptPatterns,
    Plot,
    PlotForce,
    RegionDtype,
    Target,
)
from amp_script.errors import SubmoduleError, UsageError
from amp_script.tables import printable


def command(
    target: Target,
    input_specs: InputSpecs = None,
    inputs_target: InputsTarget = None,
    dtype: RegionDtype = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to run, such as `cpu` or `cuda`.")
    ] = "cpu",
    keep_float32: KeptPatterns = None,
    advise: Annotated[
        bool,
        typer.Option(
            "--advise/--no-advise",
            help="Run the model with this and that submodule in float32, to say which to keep.",
        ),
    ] = True,
    top: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many calls to show, the worst first.")
    ] = 20,
    plot: Plot = None,
    as_json: AsJson = False,
    force: PlotForce = False,
) -> None:
    """Show how far a model under autocast is from float32, layer by layer, worst first.

    A layer's *own* error is what it makes of the inputs that float32 has; the *accumulated* one
    holds what went wrong before it as well. What to keep in float32 is named, after runs that try
    it out; `amp-script freeze --keep-float32` does so.

    Example: `amp-script compare models.py:resnet --input 1x3x224x224 --dtype float16`
    """
    region_dtype = None if dtype is None else choice("--dtype", dtype, DTYPES)
    if plot is not None:
        require_free(plot, force)
        require_plots(plot)
    place = device_of(device)
    make_inputs = example_inputs(input_specs or [], inputs_target)
    with output.step(f"loading {target}"):
        model = targets.load_model(target).to(place)
        inputs, kwargs = moved(make_inputs(), place)
    with output.stages() as progress:
        try:
            report = amp_script.compare_layers(
                model,
                inputs,
                example_kwargs=kwargs,
                device_type=place.type,
                dtype=region_dtype,
                keep_float32=keep_float32 or [],
                advise=advise,
                progress=progress,
            )
        except SubmoduleError as error:
            raise UsageError(f"--keep-float32 {error.pattern}: {error.reason}") from error
    if plot is not None:
        with output.step(f"drawing {plot}"):
            _draw(report, report.worst_first()[:top], plot)
    if as_json:
        output.line(report.to_json())
    else:
        _show(report, top)


def _show(report: LayerReport, top: int) -> None:
    output.line(report.verdict)
    output.line("")
    output.grid(report.table(top))
    if len(report.calls) > top:
        output.line(f"and {len(report.calls) - top} more calls: --top N")
    output.line("")
    for remark in report.remarks():
        output.line(remark)
    advice = report.advice
    if advice is not None and advice.worth_it:
        names = [*report.keep_float32, *advice.blocks]
        freeze = shlex.join(["amp-script", "freeze", "...", *_options(names)])
        output.line(f"or {printable(freeze)}")


def _options(names: Sequence[str]) -> list[str]:
    return [word for name in names for word in ("--keep-float32", name)]


def _draw(report: LayerReport, calls: Sequence[LayerCall], file: Path) -> None:
    """Draw both errors of each call as bars, the worst at the top, and mark what is lost."""
    from matplotlib.figure import Figure

    shown = [call for call in calls if call.own is not None or call.accumulated is not None][::-1]
    rows = range(len(shown))
    accumulated = [0.0 if call.accumulated is None else call.accumulated.relative for call in shown]
    own = [0.0 if call.own is None else call.own.relative for call in shown]
    errors = [error for error in [*own, *accumulated] if error] or [1e-6]
    left = 10.0 ** math.floor(math.log10(min(errors)))
    figure = Figure(figsize=(8, min(1.6 + 0.36 * len(shown), 200)), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_xlim(left, 2 * max(errors))
    for name, found, height, color in (
        ("accumulated", accumulated, 0.8, "#cdd3da"),
        ("own", own, 0.45, "#1f77b4"),
    ):
        widths = [max(0.0, error - left) for error in found]
        axes.barh(rows, widths, left=left, height=height, color=color, label=name)
    lost = [
        place for place, call in zip(rows, shown, strict=True) if call.own and call.own.nonfinite
    ]
    if lost:
        axes.scatter(
            [left] * len(lost),
            lost,
            marker="X",
            color="#c0392b",
            zorder=3,
            clip_on=False,
            label="infinities or NaN of its own",
        )
    # A name may hold what matplotlib takes for mathematics.
    axes.set_yticks(rows, [call.label.replace("$", r"\$") for call in shown])
    axes.set_xlabel("relative error to float32")
    axes.set_title(report.verdict, loc="left", fontsize="medium", wrap=True, parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower right", ncols=3, frameon=False, fontsize="small")
    figure.savefig(file)
