"""``amp-script stubs``: where the type stubs for torch are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from amp_script import torch_stubs
from amp_script.cli import output


def command(
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIRECTORY",
            help="Make the directory here, for a setting that names it. Repeat this when torch "
            "or amp-script is upgraded.",
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Print where the partial stub package `torch-stubs` itself is, to copy it or to "
            "name it in PYTHONPATH for mypy.",
        ),
    ] = False,
) -> None:
    """Print a directory with type stubs for torch, made for the torch that is installed.

    Name it in mypy's `mypy_path` or in pyright's `stubPath`. Without a directory of its own it is
    in the user's cache, under a name that changes when torch does.

    Example: `MYPYPATH=$(amp-script stubs) mypy --strict service`
    """
    if partial:
        output.line(str(torch_stubs.partial_package().parent))
    elif target is not None:
        output.line(str(torch_stubs.write_search_path(target.absolute())))
    else:
        output.line(str(torch_stubs.search_path()))
