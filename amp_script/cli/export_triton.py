"""``amp-script export-triton``: a frozen file in, a model of Triton Inference Server out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import amp_script
from amp_script import triton
from amp_script.cli import output
from amp_script.cli.inputs import choice, inputs_if_any, program_call
from amp_script.cli.options import InputsTarget
from amp_script.compute import Compute
from amp_script.dtypes import dtype_name
from amp_script.errors import AmpScriptError, ExportError, UsageError
from amp_script.frozen import FrozenModule

PLANS: dict[str, Compute] = {"native": "native", "upcast": "upcast"}


def command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `amp-script freeze` wrote.")],
    repository: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="The model repository; made if it is missing."
        ),
    ],
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="The model's name; FILE's, without its ending, if not given."
        ),
    ] = None,
    max_batch_size: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="How many rows Triton may put into one batch, the first dimension of every input "
            "and output being the batch; 0 for a model that takes its inputs as they are.",
        ),
    ] = 0,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            help="`native`, or `upcast` for servers whose processors have no kernels in the lower "
            "precision; as FILE holds it if not given.",
        ),
    ] = None,
    input_specs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SPEC",
            help="An input for a run that shows what the outputs are, once for each, such as "
            "`1x3x224x224`. Without any, inputs are made from what FILE says about its own.",
        ),
    ] = None,
    inputs_target: InputsTarget = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model of that name that this command wrote.")
    ] = False,
) -> None:
    """Write a frozen file as a model for Triton Inference Server's PyTorch backend.

    Names, dtypes and sizes come from what the file says about itself; sizes that vary are -1.
    Nested inputs and outputs become tensors with names of their own.

    Example: `amp-script export-triton resnet.pt -o models --max-batch-size 32`
    """
    plan = None if compute is None else choice("--compute", compute, PLANS)
    given = inputs_if_any(input_specs, inputs_target)
    if not repository.absolute().parent.is_dir():
        raise UsageError(f"no folder {repository.parent} to make {repository.name} in")
    if repository.exists() and not repository.is_dir():
        raise UsageError(f"{repository} is a file: expected a folder after -o")
    name = file.stem if name is None else name
    try:
        triton.require_name(name)
    except ExportError as error:
        raise UsageError(f"--name: {error}") from error
    if (repository / name).exists() and not force:
        raise UsageError(
            f"{repository / name} exists: pass --force to replace it, or another --name"
        )
    with output.step(f"loading {file}"):
        program = amp_script.load(file)
        if not isinstance(program, FrozenModule):
            raise AmpScriptError(
                f"{file} is a scripted program, whose file does not say what goes in and comes "
                "out; freeze the model with amp-script freeze"
            )
        if plan is not None:
            program = program.baked(plan)
        call = program_call(program, None if given is None else given())
    with output.step(f"writing {repository / name}"):
        inputs, outputs = triton.write_repository(
            program, repository, name, call=call, max_batch_size=max_batch_size, force=force
        )
    output.table(
        [
            ("model", str(repository / name)),
            ("batches", f"up to {max_batch_size} rows" if max_batch_size else "none"),
            ("runs in", f"{program.metadata.compute} kernels on {program.metadata.device}"),
            *((f"input {port.name}", _described(port)) for port in inputs),
            *((f"output {port.name}", _described(port)) for port in outputs),
        ]
    )


def _described(port: triton.Port) -> str:
    sizes = "x".join("?" if size is None else str(size) for size in port.sizes)
    return f"{dtype_name(port.dtype)} {sizes}, {port.path}"
