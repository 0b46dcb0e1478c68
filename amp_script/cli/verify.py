"""``amp-script verify``: a ``.pt`` file against the model that it was made from."""

from __future__ import annotations

from typing import Annotated

import typer

import amp_script
from amp_script.cli import output, targets
from amp_script.cli.inputs import BORDER_DTYPES, choice, device_of, example_inputs, moved
from amp_script.cli.options import BorderDtype, FrozenFile, InputSpecs, InputsTarget, Target
from amp_script.compute import Compute
from amp_script.errors import AmpScriptError, VerificationError

PLANS: dict[str, Compute] = {"auto": "auto", "native": "native", "upcast": "upcast"}


def command(
    file: FrozenFile,
    target: Target,
    input_specs: InputSpecs = None,
    inputs_target: InputsTarget = None,
    compute: Annotated[
        str, typer.Option(metavar="PLAN", help="`native`, `upcast` or `auto`.")
    ] = "auto",
    output_dtype: BorderDtype = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where to run both, such as `cpu` or `cuda`.")
    ] = "cpu",
    exact: Annotated[
        bool, typer.Option("--exact", help="Accept equal bits alone, not also as near to float32.")
    ] = False,
) -> None:
    """Compare a frozen file with its model under eager autocast.

    Each output passes if its bits are eager autocast's or, unless `--exact`, if its distance to
    float32 is at most 1.05 times eager autocast's.

    Example: `amp-script verify resnet.pt models.py:resnet --input 1x3x224x224`
    """
    plan = choice("--compute", compute, PLANS)
    border = None if output_dtype is None else choice("--output-dtype", output_dtype, BORDER_DTYPES)
    place = device_of(device)
    make_inputs = example_inputs(input_specs or [], inputs_target)
    with output.step(f"loading {file} and {target}"):
        program = amp_script.load(file, compute=plan, map_location=place)
        model = targets.load_model(target).to(place)
        inputs, kwargs = moved(make_inputs(), place)
    with output.step("comparing with eager autocast"):
        try:
            report = amp_script.verify(
                program, model, inputs, kwargs=kwargs, output_dtype=border, exact=exact
            )
        except VerificationError as error:
            for text in str(error.report).splitlines()[1:]:
                output.line(text)
            verdict = str(error.report).partition("\n")[0]
            raise AmpScriptError(f"{file}: {verdict}") from error
    for text in str(report).splitlines():
        output.line(text)
