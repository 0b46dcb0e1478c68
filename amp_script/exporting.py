"""Models for those who leave TorchScript: exported under our autocast, with eager autocast's bits.

The exported program holds the region as torch.export records it, so that every operator in it is
cast by the installed torch's own dispatcher when the program runs, whatever is on around it. What
lowers the program further, such as AOTInductor, makes casts of it. Weights stay as the model has
them, under the model's own names.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from amp_script import verification
from amp_script.artifact import replacing
from amp_script.autocast_mode import autocast
from amp_script.calls import Call, Inputs
from amp_script.dtypes import require_dtype
from amp_script.errors import ExportError, TracingError, VerificationError
from amp_script.float32_blocks import Float32Blocks
from amp_script.gist import first_line, gist
from amp_script.interception import replaced
from amp_script.jit_state import shield
from amp_script.metadata import InputSpec
from amp_script.regions import Region, border_dtype
from amp_script.requirements import require_runnable
from amp_script.structure import (
    Constant,
    Container,
    Structure,
    described,
    first_difference,
    map_tensors,
)
from amp_script.untouched import seeded, untouched

__all__ = ["export", "inputs_of", "save_exported"]


def export(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    keep_float32: Sequence[str] = (),
    check_inputs: Iterable[Inputs] = (),
    verify: bool = True,
) -> ExportedProgram:
    """Export a model under autocast with ``torch.export``.

    The program is for inference: it is exported without gradients. ``torch.export.save`` writes it,
    ``torch.export.load`` reads it, and ``program.module()`` runs it.

    Args:
        model: a module in evaluation mode.
        example_inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. An argument is a tensor or a nested structure of tensors.
        example_kwargs: keyword arguments beside positional ones.
        device_type: device type of the region, of the parameters and of the inputs.
        dtype: dtype of the region; the device's default where None.
        output_dtype: dtype of floating-point outputs; eager autocast's where None.
        keep_float32: submodules that stay in float32; see :func:`amp_script.keep_float32`.
        check_inputs: more inputs, in other sizes, on which the program must do as the model does.
            Sizes that differ from the example's are free in the program; all others are fixed, as
            ``torch.export`` fixes them.
        verify: compare the program with eager autocast on all the inputs, to the bit.

    Returns:
        The exported program, with the model's names of weights, arguments and outputs.

    Raises:
        ExportError: torch.export cannot take the model; the cause is its error.
        TracingError: the model is in training mode, or the inputs do not fit it.
        ArgumentError: a dtype is none.
        VerificationError: the program is not what eager autocast is; holds the report.
    """
    if not isinstance(model, nn.Module):
        raise ExportError(
            f"the model is a {type(model).__name__}: torch.export takes an nn.Module, so make the "
            "function the forward of one"
        )
    if isinstance(check_inputs, (torch.Tensor, Mapping)):
        raise TracingError(
            f"check_inputs is a {type(check_inputs).__name__}: expected a list of inputs, each "
            "like example_inputs"
        )
    require_dtype("output_dtype", output_dtype)
    region = Region.resolve(device_type, dtype)
    call = Call.bind(model, example_inputs, example_kwargs)
    checks = [
        Call.bind(model, inputs, None if isinstance(inputs, Mapping) else example_kwargs)
        for inputs in check_inputs
    ]
    for index, check in enumerate(checks):
        _require_alike(check, call, f"check_inputs[{index}]")
    require_runnable(model, call, region)
    kept = Float32Blocks.select(model, keep_float32)
    with (
        shield(),
        torch.no_grad(),
        untouched([model]),
        seeded(region.device_type),
        kept.enter() as ran,
    ):
        program = _exported(model, call, checks, region, output_dtype)
        kept.require_ran(ran)
        for each in (call, *checks) if verify else ():
            _verify(program, model, each, region, output_dtype)
    return program


def inputs_of(program: ExportedProgram) -> list[InputSpec]:
    """What a program takes, with the sizes that vary as ``None``."""
    values = {node.name: node.meta["val"] for node in program.graph.nodes if "val" in node.meta}
    return [
        InputSpec(
            str(name),
            values[name].dtype,
            tuple(size if isinstance(size, int) else None for size in values[name].shape),
            values[name].device.type,
        )
        for name in program.graph_signature.user_inputs
        if isinstance(values.get(str(name)), torch.Tensor)
    ]


def save_exported(program: ExportedProgram, path: str | os.PathLike[str]) -> None:
    """Write a program to a ``.pt2`` file that ``torch.export.load`` reads, all of it or nothing.

    Raises:
        ArtifactError: the file cannot be written.
    """
    with replacing(Path(path)) as temporary, _deprecations_unsaid():
        torch.export.save(program, temporary)


def _exported(
    model: nn.Module,
    call: Call,
    checks: Sequence[Call],
    region: Region,
    output_dtype: torch.dtype | None,
) -> ExportedProgram:
    def at_border(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(border_dtype(tensor.dtype, output_dtype))

    def in_region(forward: Any, *args: object, **kwargs: object) -> object:
        with autocast(region.device_type, region.dtype, cache_enabled=False):
            result = forward(*args, **kwargs)
        # torch.export puts a check of the dtype before each `to`, and takes some operators' for
        # another than they have in a region.
        return result if output_dtype is None else map_tensors(result, at_border, "output")

    # An input that is passed twice is two inputs to whoever calls the program.
    args, kwargs = call.arguments(call.fresh())
    try:
        # A model that is exported by itself keeps its names, which one in a wrapper does not.
        with replaced(model, "forward", in_region), _deprecations_unsaid():
            # torch.export frees no size of an argument that has no name in the signature.
            forward: Any = model.forward
            forward.__signature__ = call.signature
            return torch.export.export(
                model,
                args,
                kwargs,
                dynamic_shapes=_dynamic_shapes(call, checks),
                strict=False,
            )
    except Exception as error:
        raise ExportError(f"torch.export cannot take the model: {gist(error)}") from error


def _verify(
    program: ExportedProgram,
    model: nn.Module,
    call: Call,
    region: Region,
    output_dtype: torch.dtype | None,
) -> None:
    args, kwargs = call.arguments()
    try:
        with _deprecations_unsaid():
            verification.verify(
                program.module(),
                model,
                args,
                kwargs=kwargs,
                device_type=region.device_type,
                dtype=region.dtype,
                output_dtype=output_dtype,
                exact=True,
            )
    except VerificationError as error:
        raise VerificationError(error.report, _explanation(model)) from error
    except RuntimeError as error:
        raise ExportError(
            f"the exported program does not run on the inputs: {first_line(error)}"
        ) from error


def _explanation(model: nn.Module) -> str:
    """What may be at the bottom of a difference."""
    fast = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
    found = next((type(part).__name__ for part in model.modules() if isinstance(part, fast)), "")
    if not found or not torch.backends.mha.get_fastpath_enabled():
        return ""
    return (
        f"\nwithout gradients nn.{found} runs in a kernel of its own, which torch.export does not "
        "record; after torch.backends.mha.set_fastpath_enabled(False) eager mode does as the "
        "exported program does"
    )


def _require_alike(check: Call, example: Call, name: str) -> None:
    """Refuse inputs that one program cannot take beside the example.

    Raises:
        ExportError: they have other arguments, another structure, other values that are no tensors,
            or a tensor of another number of dimensions; names the first of them.
    """
    advice = "one exported program cannot take both; export one for each"
    if check.parameters.keys() != example.parameters.keys():
        given, expected = (", ".join(map(repr, call.parameters)) for call in (check, example))
        raise ExportError(f"{name} gives {given}, and example_inputs {expected}: {advice}")
    for argument, structure in example.parameters.items():
        different = first_difference(structure, check.parameters[argument])
        if different is not None:
            expected, given = map(described, different)
            raise ExportError(
                f"{different[0].path} is {given} in {name}, and {expected} in example_inputs: "
                f"{advice}"
            )
    tensors = dict(check.named_tensors())
    for path, tensor in example.named_tensors():
        if tensor.dim() != tensors[path].dim():
            raise ExportError(f"{path} has another number of dimensions in {name}: {advice}")


def _dynamic_shapes(call: Call, checks: Sequence[Call]) -> dict[str, object] | None:
    """Which sizes differ among calls, by argument; None if none does."""
    sizes: list[dict[int, object] | None] = []
    others = [dict(check.named_tensors()) for check in checks]
    for path, tensor in call.named_tensors():
        shapes = zip(tensor.shape, *(other[path].shape for other in others), strict=True)
        sizes.append(
            {i: Dim.DYNAMIC for i, each in enumerate(shapes) if len(set(each)) > 1} or None
        )
    if not any(sizes):
        return None
    remaining = iter(sizes)
    return {name: _mirrored(part, remaining) for name, part in call.parameters.items()}


def _mirrored(structure: Structure, sizes: Iterator[object]) -> object:
    """A structure with what is said of a tensor's sizes in the tensor's place."""
    if isinstance(structure, Container):
        return structure.rebuild([_mirrored(part, sizes) for part in structure.parts])
    return None if isinstance(structure, Constant) else next(sizes)


@contextmanager
def _deprecations_unsaid() -> Iterator[None]:
    """Keep quiet about what torch.export itself still uses and torch deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
