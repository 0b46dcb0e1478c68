"""Inputs made from what a file says about its own, for whoever has no better ones at hand.

Metadata know each tensor's place, dtype and sizes, and not what its values mean. So floating-point
values follow the standard normal distribution, and integers are 0 or 1, which are valid as an
index, a mask and a kind of token alike.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, Final

import torch

from amp_script.errors import InputError
from amp_script.frozen import FrozenModule
from amp_script.metadata import InputSpec

__all__ = ["make_inputs", "split_path"]

VARYING_BATCH: Final = 1
"""Size of a first dimension that varies."""

VARYING_SIZE: Final = 64
"""Size of any other that does: a short sequence, or a small image."""


def make_inputs(program: FrozenModule, seed: int = 0) -> dict[str, object]:
    """Make one set of inputs for a frozen program.

    Args:
        program: its metadata say which inputs it takes.
        seed: of the values.

    Returns:
        The arguments of ``forward`` by name. Tuples, lists and mappings of tensors are lists and
        dictionaries. Arguments that the program holds fast have the values that it holds.

    Raises:
        InputError: an input cannot be made; says which, and why.
    """
    generator = torch.Generator().manual_seed(seed)
    held = _held_fast(program)
    made: dict[str, object] = {}
    for spec in program.metadata.inputs:
        name, steps = split_path(spec.name)
        if spec.dtype is not None:
            made[name] = _put(made.get(name), steps, _tensor(spec, spec.dtype, generator))
        elif not steps and name in held:
            made[name] = held[name]
        else:
            raise InputError(
                f"input {spec.name} is no tensor, and its value is not in the metadata; give real "
                "inputs"
            )
    if not made:
        raise InputError("the metadata name no inputs; give real ones")
    return made


def _held_fast(program: FrozenModule) -> dict[str, object]:
    forward: Any = program.forward
    return {
        argument.name: argument.default_value
        for argument in forward.schema.arguments
        if argument.has_default_value()
    }


def _tensor(spec: InputSpec, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if spec.shape is None:
        raise InputError(f"input {spec.name} may have any number of dimensions; give real inputs")
    shape = [
        size if size is not None else VARYING_SIZE if index else VARYING_BATCH
        for index, size in enumerate(spec.shape)
    ]
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        values = torch.randn(shape, generator=generator, dtype=kind)
    else:
        values = torch.randint(2, shape, generator=generator)
    return values.to(spec.device, dtype)


_STEP: Final = re.compile(
    r"""\.(?P<field>\w+) | \[(?P<key>\d+ | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*")\]""", re.VERBOSE
)


def split_path(path: str) -> tuple[str, list[str | int]]:
    """An argument's name, and the keys from it to a tensor inside.

    Raises:
        InputError: no path of an input, such as ``"batch['ids']"``.
    """
    name = re.split(r"[.\[]", path, maxsplit=1)[0]
    steps: list[str | int] = []
    position = len(name)
    while position < len(path):
        found = _STEP.match(path, position)
        if found is None:
            raise InputError(f"input {path!r}: no place inside an argument, from {path[position:]}")
        steps.append(found["field"] or ast.literal_eval(found["key"]))
        position = found.end()
    return name, steps


def _put(container: Any, steps: Sequence[str | int], value: object) -> Any:
    """Put a value into nested lists and dictionaries that are made as they are needed."""
    if not steps:
        return value
    step, *rest = steps
    if isinstance(step, str):
        container = {} if container is None else container
        container[step] = _put(container.get(step), rest, value)
        return container
    container = [] if container is None else container
    inner = container[step] if step < len(container) else None
    container[step : step + 1] = [_put(inner, rest, value)]
    return container
