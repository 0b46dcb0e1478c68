"""``amp-script doctor``: what this machine and this torch make of mixed precision."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

import typer

from amp_script import compute, policy
from amp_script.cli import output
from amp_script.errors import AmpScriptError, UsageError
from amp_script.policy.observe import Observation, observe

__all__ = ["command"]


def command(
    policies: Annotated[
        bool,
        typer.Option(
            "--policies",
            help="Watch what this torch's autocast does to every operator that it handles, and "
            "compare it with what amp-script goes by. Takes a few seconds a device.",
        ),
    ] = False,
    devices: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="With `--policies`: a device type to watch, once for each; all if not given. The "
            "device need not be there.",
        ),
    ] = None,
    libraries: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="With `--policies`: a module with operators of its own, once for each.",
        ),
    ] = None,
) -> None:
    """Show what the processor offers, and which compute plan `auto` takes on it.

    *native* uses reduced-precision kernels; *packed* and *upcast* take the same rounded values
    through float32 kernels, where the processor has no fast ones for the dtype.

    Example: `amp-script doctor --policies --import torchvision`
    """
    unused = [name for name, given in (("--device", devices), ("--import", libraries)) if given]
    if unused and not policies:
        raise UsageError(f"{' and '.join(unused)}: expected together with --policies")
    device_types = _device_types(devices)
    output.table(compute.describe().rows())
    if policies:
        _show_policies(device_types, libraries or [])


def _device_types(wanted: Sequence[str] | None) -> list[str]:
    for device_type in wanted or []:
        if not policy.has_autocast(device_type):
            raise UsageError(
                f"--device {device_type}: no device type with autocast in this torch, which has "
                f"{', '.join(policy.autocast_device_types())}"
            )
    return list(wanted or policy.autocast_device_types())


def _show_policies(device_types: Sequence[str], libraries: Sequence[str]) -> None:
    for library in libraries:
        try:
            importlib.import_module(library)
        except ImportError as error:
            raise UsageError(f"--import {library}: {error}") from error
    differing: list[Observation] = []
    for device_type in device_types:
        operators = policy.listed_operators(device_type)
        if not operators:
            continue
        with _deprecations_unsaid():
            report = observe([device_type])
        found = report.disagreements
        differing += found
        said = f"{len(found)} not as recorded" if found else "all as recorded"
        output.table([(f"autocast on {device_type}", f"{len(operators)} operators, {said}")])
    for seen in differing:
        output.line(str(seen))
    if differing:
        raise AmpScriptError(
            f"this torch autocasts {len(differing)} operators in ways that amp-script does not go "
            "by, and programs with them are refused or differ from eager autocast; record them "
            "with amp_script.policy.register, or look for a newer amp-script"
        )


@contextmanager
def _deprecations_unsaid() -> Iterator[None]:
    """Keep quiet about deprecated operators, which are watched like all others.

    torch warns of them from C++, straight to the descriptor of standard error.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
