"""The folder of a model: its configuration and its program, both or neither."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from amp_script.artifact import load, save
from amp_script.calls import Call
from amp_script.errors import ExportError
from amp_script.frozen import FrozenModule
from amp_script.made_inputs import make_inputs
from amp_script.structure import flatten
from amp_script.triton.adapter import on_tensors
from amp_script.triton.border import Border, Port
from amp_script.triton.config import KINDS, config
from amp_script.verification import DISTANCE_IN_EPS, RUNS, ulp_difference

__all__ = ["require_name", "write_repository"]

CONFIG: Final = "config.pbtxt"
PROGRAM: Final = "1/model.pt"


def write_repository(
    program: FrozenModule,
    repository: Path,
    name: str,
    *,
    call: Call | None = None,
    max_batch_size: int = 0,
    force: bool = False,
) -> tuple[Sequence[Port], Sequence[Port]]:
    """Write ``repository/name`` with ``config.pbtxt`` and ``1/model.pt``, all of it or nothing.

    Sizes are those of the program's examples, and -1 where the metadata say that they vary. What is
    written is loaded and compared with the program to the bit.

    Args:
        program: what ``trace_and_freeze`` or ``load`` returned; served with the plan that its file
            holds, because only :func:`amp_script.load` decides a plan again.
        repository: the folder of models, made if it is missing.
        name: the model's name.
        call: inputs for a run that shows what the outputs are; made from the metadata if None.
        max_batch_size: how many rows the server may put into one batch. 0 where the model takes
            whole inputs as they are. Otherwise the first dimension of every input and output is the
            batch: the program is run to see that it takes other batches than the example's, and
            that a row's result does not depend on the other rows.
        force: replace what a former call wrote.

    Returns:
        The inputs and the outputs.

    Raises:
        ExportError: the backend cannot take the program, or the place is taken; says what to do.
        InputError: no inputs can be made from the metadata.
        ArtifactError: the program cannot be written.
        OSError: the folder cannot be written to.
    """
    place = repository / name
    require_name(name)
    _require_free(place, force)
    device = program.metadata.device
    if device not in KINDS:
        raise ExportError(
            f"the program is for {device}, and the server has instances for {' and '.join(KINDS)}; "
            "load it with map_location"
        )
    stored = FrozenModule.wrap(program, program.metadata, compute=program.metadata.compute)
    call = call or Call.bind(stored, make_inputs(stored))
    result = _run(stored, call)
    border = Border.of(stored, call, result)
    if max_batch_size:
        _require_batches(stored, call, border)
    served = stored if border.is_servable() else on_tensors(stored, border)
    repository.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=repository) as folder:
        written = Path(folder) / name
        (written / PROGRAM).parent.mkdir(parents=True)
        (written / CONFIG).write_text(config(name, border, max_batch_size, device), "utf-8")
        save(served, written / PROGRAM)
        loaded = load(written / PROGRAM, compute=stored.metadata.compute)
        _require_same_bits(loaded, served is stored, border, call, result)
        _put_in_place(written, place, Path(folder) / "replaced")
    return border.inputs, border.outputs


def require_name(name: str) -> None:
    """Refuse what no folder of a model may be called.

    Raises:
        ExportError: says what names there may be.
    """
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise ExportError(
            f"{name!r} cannot be a model's name: expected letters, digits, '_', and inside also "
            "'-' and '.'; choose another"
        )


def _require_free(place: Path, force: bool) -> None:
    """Refuse a place that is taken, and to delete more than what this module writes."""
    if not place.exists():
        return
    if not force:
        raise ExportError(f"{place} exists: say that it may be replaced, or choose another name")
    if not place.is_dir():
        raise ExportError(f"{place} is a file; choose another name")
    found = {path.relative_to(place).as_posix() for path in place.rglob("*")}
    others = sorted(found - {CONFIG, PROGRAM, "1"})
    if others:
        raise ExportError(
            f"{place} also holds {', '.join(others[:3])}, which would be deleted; move it away, or "
            "choose another name"
        )


def _put_in_place(written: Path, place: Path, aside: Path) -> None:
    """Let a folder take the place of another, which is there again if that fails."""
    replaces = place.exists()
    if replaces:
        place.rename(aside)
    try:
        written.rename(place)
    except BaseException:
        if replaces:
            aside.rename(place)
        raise


def _run(program: FrozenModule, call: Call) -> object:
    try:
        with torch.no_grad():
            return call.run(program, call.fresh())
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise ExportError(
            f"the program fails on its inputs, which are made from its metadata if none are given: "
            f"{reason}"
        ) from error


def _require_batches(program: FrozenModule, call: Call, border: Border) -> None:
    """Refuse a program whose first dimension is not that of a batch of rows.

    Two rows are run alone and together. A processor sums up in another order for another number of
    rows, so results need not be equal to the bit.
    """
    sizes = {
        port.path: tensor.shape[0] for port, tensor in zip(border.inputs, call.tensors, strict=True)
    }
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise ExportError(
            f"no batch is the first dimension of every input: {said}; use a max_batch_size of 0"
        )
    one = [tensor[:1] for tensor in call.tensors]
    other = [tensor[-1:].roll(1, -1) for tensor in call.tensors]
    together = [torch.cat(pair) for pair in zip(one, other, strict=True)]
    alone, others, both = (_tensors(program, call, rows) for rows in (one, other, together))
    for port, first, second, pair in zip(border.outputs, alone, others, both, strict=True):
        expected = (2, *first.shape[1:])
        if first.shape[0] != 1 or tuple(pair.shape) != expected:
            raise ExportError(
                f"output {port.path} has {list(first.shape)} as its sizes for one row and "
                f"{list(pair.shape)} for two, so that its first dimension is no batch; use a "
                "max_batch_size of 0"
            )
        limit = DISTANCE_IN_EPS * torch.finfo(program.metadata.dtype or torch.bfloat16).eps
        if _distance(pair, torch.cat([first, second])) > limit:
            raise ExportError(
                f"a row of output {port.path} depends on the other rows of its batch; use a "
                "max_batch_size of 0"
            )


def _tensors(
    program: FrozenModule, call: Call, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    return flatten(_run(program, replace(call, tensors=tuple(tensors))), "output")[0]


def _distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm; 0 for integers, which rounding may turn."""
    if not expected.is_floating_point():
        return 0.0
    difference = (given.double() - expected.double()).norm()
    return float(difference / (expected.double().norm() or 1.0))


def _require_same_bits(
    program: Callable[..., object],
    served_as_it_is: bool,
    border: Border,
    call: Call,
    result: object,
) -> None:
    """Run what was written as the server does, and compare it with the program's result."""
    given = {port.name: tensor for port, tensor in zip(border.inputs, call.tensors, strict=True)}
    expected, _ = flatten(result, "output")
    for _ in range(RUNS):
        with torch.no_grad():
            again = call.run(program, call.fresh()) if served_as_it_is else program(**given)
        got, _ = flatten(again, "output")
        for port, one, other in zip(border.outputs, got, expected, strict=True):
            if one.dtype is not other.dtype or ulp_difference(one, other) != 0:
                raise ExportError(
                    f"the program that was written gives another {port.path} than the one that it "
                    "was written from, which is an error of this library's; please report it"
                )
