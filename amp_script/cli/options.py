"""Arguments and options that several commands have, each written once, in typer's notation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

__all__ = [
    "AsJson",
    "BorderDtype",
    "Force",
    "FrozenFile",
    "InputSpecs",
    "InputsTarget",
    "KeptPatterns",
    "Plot",
    "PlotForce",
    "RegionDtype",
    "Target",
]

Target: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="The model, as `package.module:attribute` or `path/file.py:attribute`: an "
        "`nn.Module` in evaluation mode, or a function that returns one.",
    ),
]

FrozenFile: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="What `amp-script freeze` wrote.")
]

InputSpecs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SPEC",
        help="An input, once for each: `1x3x224x224`, `float32[0,1]:1x16` or "
        "`ids=int64[0,30522):1x128`. With a name it is passed by keyword.",
    ),
]

InputsTarget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="MODULE:ATTR",
        help="Real inputs instead, named like TARGET: a tensor, a tuple, a dictionary by "
        "parameter name, or a function that returns one.",
    ),
]

RegionDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(metavar="DTYPE", help="`bfloat16` or `float16`; the device's own if not given."),
]

BorderDtype: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="The dtype of floating-point outputs, such as `float32`; eager autocast's if not "
        "given.",
    ),
]

KeptPatterns: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-float32",
        metavar="PATTERN",
        help="A submodule that stays in float32, once for each, such as `encoder.layer.3.*`; "
        "`amp-script compare` says which.",
    ),
]

Plot: TypeAlias = Annotated[
    Path | None,
    typer.Option(metavar="PLOT", help="Draw the table, as `.png`, `.svg` or `.pdf`."),
]

PlotForce: TypeAlias = Annotated[
    bool, typer.Option("--force", help="Replace the plot's file if it exists.")
]

AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print everything as JSON instead of a table.")
]

Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")]
