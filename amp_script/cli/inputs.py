"""Example inputs and the like, from the options of commands that take a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from amp_script import structure
from amp_script.calls import Call
from amp_script.cli import specs, targets
from amp_script.cli.targets import ExampleInputs
from amp_script.errors import InputError, UsageError
from amp_script.frozen import FrozenModule
from amp_script.made_inputs import make_inputs

__all__ = [
    "BORDER_DTYPES",
    "DTYPES",
    "choice",
    "device_of",
    "example_inputs",
    "inputs_if_any",
    "moved",
    "program_call",
]

T = TypeVar("T")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""What a region may be in."""

BORDER_DTYPES = {**DTYPES, "float32": torch.float32}
"""What a program may return."""


def choice(option: str, text: str, choices: Mapping[str, T]) -> T:
    """Return what a word stands for, or say which words there are."""
    if text not in choices:
        raise UsageError(f"{option} {text}: expected {' or '.join(choices)}")
    return choices[text]


def device_of(text: str) -> torch.device:
    """Return the device of a name that this torch can use."""
    try:
        place = torch.device(text)
        torch.empty(0, device=place)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"--device {text}: this torch cannot use it ({reason})") from error
    return place


def example_inputs(
    texts: Sequence[str], named: str | None
) -> Callable[[], tuple[ExampleInputs, dict[str, object]]]:
    """Return what makes the inputs and keyword arguments; wrong specs are refused before that."""
    if bool(texts) == bool(named):
        raise UsageError(
            "give example inputs with --input SPEC, once for each, or with --inputs MODULE:ATTR"
            + (", not both" if named else "")
        )
    if named:
        return lambda: (targets.load_inputs(named), {})
    parsed = [specs.parse(text) for text in texts]
    names = [spec.name for spec in parsed if spec.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two input specs are called {name!r}")

    def make() -> tuple[ExampleInputs, dict[str, object]]:
        generator = torch.Generator().manual_seed(0)
        tensors = [(spec.name, spec.make(generator)) for spec in parsed]
        return (
            tuple(tensor for name, tensor in tensors if name is None),
            {name: tensor for name, tensor in tensors if name is not None},
        )

    return make


def inputs_if_any(
    texts: Sequence[str] | None, named: str | None
) -> Callable[[], tuple[ExampleInputs, dict[str, object]]] | None:
    """Return what :func:`example_inputs` does; None where neither option is given."""
    return example_inputs(texts or [], named) if texts or named else None


def moved(value: T, place: torch.device) -> T:
    """Return nested inputs with every tensor in them on ``place``."""
    tensors, nest = structure.flatten(value, "inputs")
    return cast(T, structure.unflatten(nest, (tensor.to(place) for tensor in tensors)))


def program_call(
    program: torch.jit.ScriptModule, given: tuple[ExampleInputs, dict[str, object]] | None
) -> Call:
    """Return a call of a loaded program, by name and in the dtypes of its border.

    Args:
        program: what :func:`amp_script.load` returned.
        given: inputs and keyword arguments; made from the metadata if None.

    Raises:
        UsageError: the inputs do not fit, or the file does not say enough about its inputs.
    """
    if given is None:
        return Call.bind(program, _made(program))
    args, kwargs = Call.bind(program, *given).arguments()
    forward: Any = program.forward
    names = [argument.name for argument in forward.schema.arguments[1:]]
    if len(args) > len(names):
        raise UsageError(f"{len(args)} inputs by position: the file takes {', '.join(names)}")
    call = Call.bind(program, {**dict(zip(names, args, strict=False)), **kwargs})
    if not isinstance(program, FrozenModule):
        return call
    return call.at_border({spec.name: spec.dtype for spec in program.metadata.inputs})


def _made(program: torch.jit.ScriptModule) -> dict[str, object]:
    advice = "with --input SPEC, once for each, or with --inputs MODULE:ATTR"
    if not isinstance(program, FrozenModule):
        raise UsageError(f"this file says nothing about its inputs; give some {advice}")
    try:
        return make_inputs(program)
    except InputError as error:
        raise UsageError(f"{error}, {advice}") from error
