"""What goes into a program and what comes out, as Triton names and describes it."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, Final, Literal, TypeAlias

import torch

from amp_script.calls import Call
from amp_script.dtypes import dtype_name
from amp_script.errors import ExportError
from amp_script.frozen import FrozenModule
from amp_script.made_inputs import split_path
from amp_script.metadata import InputSpec
from amp_script.structure import Constant, Structure, flatten, leaves
from amp_script.untouched import seeded

__all__ = ["DATA_TYPES", "Border", "JitType", "Port", "is_kind", "place_of", "run"]

DATA_TYPES: Final[Mapping[torch.dtype, str]] = {
    torch.bool: "TYPE_BOOL",
    torch.uint8: "TYPE_UINT8",
    torch.int8: "TYPE_INT8",
    torch.int16: "TYPE_INT16",
    torch.int32: "TYPE_INT32",
    torch.int64: "TYPE_INT64",
    torch.float16: "TYPE_FP16",
    torch.float32: "TYPE_FP32",
    torch.float64: "TYPE_FP64",
}
"""Triton's names of the dtypes that its PyTorch backend takes."""

JitType: TypeAlias = Any
"""A ``torch._C.JitType`` of some kind, whose methods torch's stubs lack."""

Sizes: TypeAlias = "tuple[int | None, ...]"


@dataclass(frozen=True)
class Port:
    """One input or output as the server offers it.

    Attributes:
        name: by which clients know it.
        path: its place in the program's arguments or result, such as ``"batch['ids']"``.
        dtype: the tensor's.
        sizes: of its dimensions, the batch among them; ``None`` for one that varies.
    """

    name: str
    path: str
    dtype: torch.dtype
    sizes: Sizes


@dataclass(frozen=True)
class Border:
    """A program's arguments and its result, taken apart to tensors.

    Attributes:
        inputs: the tensors among the arguments, in order.
        outputs: the tensors in the result, in order.
        arguments: TorchScript's types of all arguments by name.
        result: TorchScript's type of the result.
        structure: where each tensor of the result is.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    arguments: Mapping[str, JitType]
    result: JitType
    structure: Structure

    @classmethod
    def of(cls, program: FrozenModule, call: Call, result: object) -> Border:
        """Look at a program, and at what it returned for a call.

        Raises:
            ExportError: the backend cannot take one of them.
        """
        forward: Any = program.forward
        arguments = {argument.name: argument.type for argument in forward.schema.arguments[1:]}
        (returned,) = forward.schema.returns
        specs = [spec for spec in program.metadata.inputs if spec.dtype is not None]
        border = cls(
            tuple(_inputs(specs, arguments)),
            tuple(_outputs(result, _grown(program, call, specs))),
            arguments,
            returned.type,
            flatten(result, "output")[1],
        )
        for port in border.inputs:
            _require_servable("input", port)
        for port in border.outputs:
            _require_servable("output", port)
        return border

    def is_servable(self) -> bool:
        """Whether the backend takes the program as it is, and not only its tensors."""
        parts = self.result.elements() if is_kind(self.result, "TupleType") else [self.result]
        return _takes(self.arguments) and all(is_kind(part, "TensorType") for part in parts)

    def tensors_of(self, call: Call) -> dict[str, torch.Tensor]:
        """A call's tensors by the names of the inputs, in their order."""
        tensors = {place_of(path): tensor for path, tensor in call.named_tensors()}
        return {port.name: tensors[place_of(port.path)] for port in self.inputs}


def run(program: FrozenModule, call: Call) -> object:
    """Run a program on copies of its state and its inputs, with the same random numbers each time.

    Raises:
        RuntimeError: the program fails.
    """
    with torch.no_grad(), seeded(program.metadata.device):
        return call.run(copy.deepcopy(program), call.fresh())


def place_of(path: str) -> tuple[str | int, ...]:
    """A path's argument and keys: calls write a field as a field or as a key."""
    name, steps = split_path(path)
    return (name, *steps)


def is_kind(kind: JitType, name: str) -> bool:
    """Whether a type of TorchScript is of a kind, such as ``"TensorType"``."""
    return bool(kind.kind() == name)


def _takes(arguments: Mapping[str, JitType]) -> bool:
    """Whether the backend takes a program with such arguments."""
    kinds = list(arguments.values())
    if len(kinds) == 1 and is_kind(kinds[0], "DictType"):
        return is_kind(kinds[0].getValueType(), "TensorType")
    return all(is_kind(kind, "TensorType") for kind in kinds)


def _inputs(specs: Sequence[InputSpec], arguments: Mapping[str, JitType]) -> Iterator[Port]:
    """Name inputs as the backend looks for them in a program that it takes as it is."""
    by_key = _takes(arguments) and any(is_kind(kind, "DictType") for kind in arguments.values())
    taken = set(arguments)
    for index, spec in enumerate(specs):
        if spec.shape is None or spec.dtype is None:
            raise ExportError(
                f"input {spec.name} may have any number of dimensions, and the server asks for one"
            )
        name, steps = split_path(spec.name)
        if by_key:
            name = str(steps[0])
        elif steps:
            name = "_".join([name, *map(_word, steps)])
            names = chain([name], (f"{name}_{number}" for number in count(index)))
            name = next(free for free in names if free not in taken)
            taken.add(name)
        yield Port(name, spec.name, spec.dtype, spec.shape)


def _outputs(result: object, grown: object) -> Iterator[Port]:
    """Name outputs by their place, which the backend reads behind the two underscores."""
    tensors, structure = flatten(result, "output")
    others, _ = flatten(grown, "output") if grown is not None else ([], structure)
    index = 0
    for leaf in leaves(structure):
        if isinstance(leaf, Constant):
            if leaf.value is None:
                continue
            raise ExportError(
                f"{leaf.path} is {leaf.value!r}, and the backend returns tensors alone; freeze a "
                "function that returns the model's tensors"
            )
        tensor = tensors[index]
        sizes: Sizes = tuple(tensor.shape)
        if grown is None:
            sizes = (None,) * tensor.dim()
        elif others[index].dim() == tensor.dim():
            pairs = zip(tensor.shape, others[index].shape, strict=True)
            sizes = tuple(one if one == other else None for one, other in pairs)
        words = [_word(step) for step in split_path(leaf.path)[1] if isinstance(step, str)]
        yield Port(f"{'_'.join(words) or 'OUTPUT'}__{index}", leaf.path, tensor.dtype, sizes)
        index += 1
    if not index:
        raise ExportError("the program returns no tensor, and the server has to return one")


def _word(step: str | int) -> str:
    """A key as a part of a name; two underscores would stand before the output's number."""
    return re.sub(r"[^0-9A-Za-z]+", "_", str(step)).strip("_")


def _grown(program: FrozenModule, call: Call, specs: Sequence[InputSpec]) -> object | None:
    """What the program returns where all sizes that vary are twice as large.

    Returns:
        The result; None where the program does not take such sizes, and which sizes of the outputs
        vary cannot be seen.
    """
    varying = {
        spec.name: [index for index, size in enumerate(spec.shape or ()) if size is None]
        for spec in specs
    }
    tensors = []
    for path, tensor in call.named_tensors():
        for dim in varying.get(path, ()):
            tensor = torch.cat([tensor, tensor], dim)
        tensors.append(tensor)
    try:
        return run(program, replace(call, tensors=tuple(tensors)))
    except RuntimeError:
        return None


def _require_servable(kind: Literal["input", "output"], port: Port) -> None:
    """Refuse a tensor that cannot pass between the server and the program."""
    where = port.path if kind == "output" else f"input {port.path}"
    if port.dtype not in DATA_TYPES:
        advice = ""
        if port.dtype.is_floating_point:
            advice = (
                f"; freeze the model with {kind}_dtype=torch.float32, or on the command line with "
                f"--{kind}-dtype float32"
            )
        raise ExportError(
            f"{where} is {dtype_name(port.dtype)}, which Triton's PyTorch backend "
            f"does not take{advice}"
        )
    if not port.sizes:
        raise ExportError(
            f"{where} has no dimensions, which Triton does not take; freeze a function that gives "
            "it one"
        )
    if 0 in port.sizes:
        advice = (
            "freeze the model with an example that holds something"
            if kind == "input"
            else "give inputs for which it holds something, or freeze a function without it"
        )
        raise ExportError(
            f"{where} is empty, and Triton takes no size of 0: {list(port.sizes)}; {advice}"
        )
