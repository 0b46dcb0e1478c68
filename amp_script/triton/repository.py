"""The folder of a model: its configuration and its program, both or neither."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from amp_script.artifact import load, save
from amp_script.calls import Call
from amp_script.errors import ExportError
from amp_script.frozen import FrozenModule
from amp_script.gist import gist
from amp_script.made_inputs import make_inputs
from amp_script.structure import flatten
from amp_script.triton.adapter import on_tensors
from amp_script.triton.border import Border, Port, run
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
            that a row's result depends neither on the other rows, compared to the bit, nor,
            integers aside, on how many there are, compared within rounding.
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
    call = Call.bind(stored, make_inputs(stored) if call is None else _by_name(stored, call))
    result = _run(stored, call)
    border = Border.of(stored, call, result)
    served = stored if border.is_servable() else on_tensors(stored, border, call)
    if max_batch_size:
        _require_batches(stored, call, border)
    repository.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=repository) as folder:
        written = Path(folder) / name
        (written / PROGRAM).parent.mkdir(parents=True)
        (written / CONFIG).write_text(config(name, border, max_batch_size, device), "utf-8")
        save(served, written / PROGRAM)
        loaded: Any = load(written / PROGRAM, compute=stored.metadata.compute)
        asked = call if served is stored else Call.bind(loaded, border.tensors_of(call))
        _require_same_bits(loaded, asked, border.outputs, result)
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


def _by_name(program: FrozenModule, call: Call) -> dict[str, object]:
    """A call's arguments, those that go by position under the program's own names."""
    positional, named = call.arguments()
    forward: Any = program.forward
    names = [argument.name for argument in forward.schema.arguments[1:]]
    return {**dict(zip(names, positional, strict=False)), **named}


def _run(program: FrozenModule, call: Call) -> object:
    try:
        return run(program, call)
    except RuntimeError as error:
        raise ExportError(
            f"the program fails on its inputs, which are made from its metadata if none are given: "
            f"{gist(error)}"
        ) from error


def _require_batches(program: FrozenModule, call: Call, border: Border) -> None:
    """Refuse a program whose first dimension is not that of a batch of rows.

    A row that keeps its place in a batch of the same size goes through the same operations,
    whatever stands next to it: it has to keep its bits, be they of a number, an index or a NaN.
    Where the size or the place changes, so does the order in which a processor sums up: numbers
    have to stay near, and integers, which rounding may turn into any other, are not compared.
    """
    given = border.tensors_of(call)
    if len({tensor.shape[0] for tensor in given.values()}) > 1:
        said = ", ".join(
            f"{port.path} has {tensor.shape[0]}"
            for port, tensor in zip(border.inputs, given.values(), strict=True)
        )
        raise ExportError(
            f"no batch is the first dimension of every input: {said}; use a max_batch_size of 0"
        )
    one = [tensor[:1] for tensor in call.tensors]
    other = [_another_row(tensor) for tensor in call.tensors]
    if all(map(torch.equal, one, other)):
        raise ExportError(
            "the rows of the inputs are all alike, which cannot show whether they depend on one "
            "another; give inputs with two rows that differ, or use a max_batch_size of 0"
        )
    batches = [(one,), (other,), (one, other), (one, one), (other, other)]
    outputs = [_outputs(program, call, [*zip(*rows, strict=True)]) for rows in batches]
    for port, first, second, both, firsts, seconds in zip(border.outputs, *outputs, strict=True):
        if first.shape[0] != 1 or tuple(both.shape) != (2, *first.shape[1:]):
            raise ExportError(
                f"output {port.path} has {list(first.shape)} as its sizes for one row and "
                f"{list(both.shape)} for two, so that its first dimension is no batch; use a "
                "max_batch_size of 0"
            )
        if both.is_floating_point() and not both.isfinite().any():
            raise ExportError(
                f"output {port.path} holds no finite number, which cannot show whether its rows "
                "depend on one another; give other inputs, or use a max_batch_size of 0"
            )
        if not (_is_same(both[:1], firsts[:1]) and _is_same(both[1:], seconds[1:])):
            raise ExportError(
                f"a row of output {port.path} depends on the other rows of its batch; use a "
                "max_batch_size of 0"
            )
        limit = DISTANCE_IN_EPS * torch.finfo(program.metadata.dtype or torch.bfloat16).eps
        if not _distance(both, torch.cat([first, second])) <= limit:
            raise ExportError(
                f"a row of output {port.path} depends on how many rows are in its batch, or on its "
                "place among them; use a max_batch_size of 0"
            )


def _another_row(tensor: torch.Tensor) -> torch.Tensor:
    """The last row; where it equals the first, one made from it that does not, if there is any."""
    first, last = tensor[:1], tensor[-1:]
    made = [last, last.roll(1, -1), *([last / 2] if last.is_floating_point() else [])]
    return next((row for row in made if not torch.equal(row, first)), last)


def _outputs(
    program: FrozenModule, call: Call, rows: Sequence[Sequence[torch.Tensor]]
) -> list[torch.Tensor]:
    """Run the program on a batch, given the rows of each input."""
    batch = replace(call, tensors=tuple(torch.cat(list(each)) for each in rows))
    return flatten(_run(program, batch), "output")[0]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and one.shape == other.shape and ulp_difference(one, other) == 0


def _distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference of finite numbers over their norm; 0 for integers.

    It is infinity where one tensor has a finite number and the other has none.
    """
    if not expected.is_floating_point():
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(given.isfinite(), finite):
        return math.inf
    difference = (given[finite].double() - expected[finite].double()).norm()
    return float(difference / (expected[finite].double().norm() or 1.0))


def _require_same_bits(
    program: FrozenModule, call: Call, outputs: Sequence[Port], result: object
) -> None:
    """Run what was written as the server does, and compare it with the program's result."""
    expected, _ = flatten(result, "output")
    for _ in range(RUNS):
        got, _ = flatten(_run(program, call), "output")
        for port, one, other in zip(outputs, got, expected, strict=True):
            if not _is_same(one, other):
                raise ExportError(
                    f"the program that was written gives another {port.path} than the one that it "
                    "was written from, which is an error of this library's; please report it"
                )
