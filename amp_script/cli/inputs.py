"""Example inputs and the like, from the options of commands that take a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, cast

import torch

from amp_script import structure
from amp_script.cli import specs, targets
from amp_script.cli.targets import ExampleInputs
from amp_script.errors import UsageError

__all__ = ["DTYPES", "choice", "device_of", "example_inputs", "moved"]

T = TypeVar("T")

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


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


def moved(value: T, place: torch.device) -> T:
    """Return nested inputs with every tensor in them on ``place``."""
    tensors, nest = structure.flatten(value, "inputs")
    return cast(T, structure.unflatten(nest, (tensor.to(place) for tensor in tensors)))
