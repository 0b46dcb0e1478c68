"""``amp-script lower``: a TorchScript file in, one with explicit casts for its regions out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

import amp_script
from amp_script.cli import output
from amp_script.cli.files import require_free
from amp_script.cli.inputs import DTYPES, choice
from amp_script.errors import AmpScriptError, UsageError


def command(
    source: Annotated[Path, typer.Argument(metavar="IN.pt", help="A TorchScript file.")],
    file: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.pt", help="The file to write.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="Put a region in `bfloat16` or `float16` around the whole program, to make a "
            "mixed-precision program of a float32 one.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="Device type of that region, such as `cpu` or `cuda`; `cpu` if --dtype alone is "
            "given. Without --dtype, the region has the device's own dtype.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.pt if it exists.")] = False,
) -> None:
    """Turn the autocast regions in a TorchScript file into explicit casts.

    The program then gives eager autocast's dtypes and bits wherever it runs, in C++ too. The
    autocast class leaves the file, so that readers that do not know it can read it.

    Example: `amp-script lower detector.pt -o detector-bf16.pt --dtype bfloat16`
    """
    require_free(file, force)
    if not source.is_file():
        raise UsageError(f"no file {source} to lower")
    chosen = None if dtype is None else choice("--dtype", dtype, DTYPES)
    try:
        with output.step(f"lowering {source}"):
            lowered = amp_script.lower(source, device_type=device, dtype=chosen)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except AmpScriptError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise AmpScriptError(f"{source} is no TorchScript program: {reason}") from error
    with output.step(f"writing {file}"):
        amp_script.save(lowered, file)
    output.table(
        [
            ("file", f"{file}, {output.size(file.stat().st_size)}"),
            ("region around it", _region(device, chosen)),
            ("methods", ", ".join(sorted(lowered._c._method_names()))),
        ]
    )


def _region(device: str | None, dtype: torch.dtype | None) -> str:
    if device is None and dtype is None:
        return "none"
    device = device or "cpu"
    return f"{device}, {dtype or torch.get_autocast_dtype(device)}"
