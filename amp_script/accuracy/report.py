"""What a comparison of a model with float32 found, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from amp_script.accuracy.difference import Difference
from amp_script.dtypes import dtype_name
from amp_script.metadata import plain
from amp_script.tables import Table, printable

__all__ = ["LARGEST_SHARE", "Advice", "LayerCall", "LayerReport"]

LARGEST_SHARE: Final = 0.5
"""The largest :attr:`Advice.share` with which it is worth it to keep blocks in float32."""

_NAMES: Final = ("submodule", "class", "dtype", "mostly from")
_NUMBERS: Final = ("own error", "largest", "inf", "NaN", "accumulated")
"""Headings of :meth:`LayerReport.table`."""

_SHOWN: Final = 20
"""How many calls :meth:`LayerReport.__str__` shows."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a submodule: how far its outputs are from float32.

    Attributes:
        name: the submodule's dotted name, the first that it has; ``""`` is the model itself.
        kind: name of the submodule's class.
        call: the how-manieth of its calls this is, from 1.
        calls: how often it was called.
        caller: index in :attr:`LayerReport.calls` of the call in which it happened, or None.
        dtypes: of its output tensors under autocast, each once.
        own: what the submodule itself adds: the difference on the inputs of the run in float32,
            rounded to the dtypes that they have under autocast. None where it could not be run so.
        accumulated: the difference on the inputs that it has under autocast, with all that went
            wrong before. None where the outputs cannot be compared.
        inside: index of the call inside this one in which most of ``own`` comes to be, or None
            where it comes from no single one.
        note: what could not be measured and why, or ``""``.
    """

    name: str
    kind: str
    call: int
    calls: int
    caller: int | None
    dtypes: tuple[torch.dtype, ...]
    own: Difference | None
    accumulated: Difference | None
    inside: int | None = None
    note: str = ""

    @property
    def label(self) -> str:
        """The name, and which call it is where there are several."""
        name = self.name or "(the model)"
        return name if self.calls == 1 else f"{name} (call {self.call} of {self.calls})"


@dataclass(frozen=True)
class Advice:
    """What to keep in float32, tried out.

    Attributes:
        blocks: names of submodules to wrap in ``autocast(enabled=False)``, or to give to
            ``keep_float32``; empty where nothing that was tried makes the result better.
        before: how far the result is from float32.
        remaining: how far it is with the blocks kept, measured.
        share: of the weights of all that differs from float32 by itself, which part the blocks
            hold, between 0 and 1: what is lost where they do not run in lower precision.
        tried: how many runs with something kept were made to find out.
    """

    blocks: tuple[str, ...]
    before: Difference
    remaining: Difference
    share: float
    tried: int

    @property
    def worth_it(self) -> bool:
        """Whether the blocks are a part of the model and at least half of the error goes."""
        if not self.blocks or self.share > LARGEST_SHARE or "" in self.blocks:
            return False
        if self.remaining.nonfinite != self.before.nonfinite:
            return self.remaining.nonfinite < self.before.nonfinite
        return self.remaining.relative <= self.before.relative / 2

    def __str__(self) -> str:
        """One sentence."""
        names = ", ".join(repr(name) if name else "the whole model" for name in self.blocks)
        change = f"{self.before} from float32 before, {self.remaining} then"
        if self.worth_it:
            return f"wrap {names} in autocast(enabled=False): {change}"
        if self.blocks:
            return (
                "no part of the model stands out: of the blocks that were tried, "
                f"{names} in autocast(enabled=False) does most: {change}"
            )
        if self.before == Difference():
            return "nothing to keep in float32: the result is float32's"
        return f"none of the blocks that were tried does better in float32; runs: {self.tried}"


@dataclass(frozen=True)
class LayerReport:
    """How far a model under autocast is from float32, call by call.

    Attributes:
        dtype: of the region.
        device: device type of the region.
        keep_float32: patterns of submodules that were kept in float32.
        output: how far the model's result is from float32.
        lost_in_float32: how many elements of the result in float32 are no finite numbers
            themselves; no difference counts them.
        calls: in the order in which they begin.
        advice: what to keep in float32; None where it was not asked for.
        not_called: names of submodules with weights whose ``forward`` did not run; where others
            read the weights, the error counts to those.
    """

    dtype: torch.dtype
    device: str
    keep_float32: tuple[str, ...]
    output: Difference
    lost_in_float32: int
    calls: tuple[LayerCall, ...]
    advice: Advice | None
    not_called: tuple[str, ...]

    def worst_first(self) -> list[LayerCall]:
        """The calls, those first that add most themselves.

        Calls to whose error one call inside of them is the key follow after all others.
        """
        nothing = Difference()
        ranked = sorted(self.calls, key=lambda call: call.own or nothing, reverse=True)
        return sorted(ranked, key=lambda call: (call.own is None, call.inside is not None))

    def __str__(self) -> str:
        """The verdict, the worst calls, a line each, and the advice."""
        lines = [self.verdict, str(self.table(_SHOWN))]
        if len(self.calls) > _SHOWN:
            lines.append(f"and {len(self.calls) - _SHOWN} more calls")
        return "\n".join([*lines, *self.remarks()])

    def table(self, top: int) -> Table:
        """The worst calls, a row each: what it is, where its own error comes from, both errors."""
        rows = [self._row(call) for call in self.worst_first()[:top]]
        return Table("", (*_NAMES, *_NUMBERS), rows, numbers=len(_NUMBERS))

    def _row(self, call: LayerCall) -> tuple[str, ...]:
        own, accumulated = call.own, call.accumulated
        return (
            call.label,
            call.kind,
            ", ".join(map(dtype_name, call.dtypes)),
            "" if call.inside is None else self.calls[call.inside].label,
            "-" if own is None else own.percent,
            "-" if own is None else f"{own.largest:.3g}",
            "-" if own is None else f"{own.infinities:,}",
            "-" if own is None else f"{own.nans:,}",
            "-" if accumulated is None else str(accumulated),
        )

    @property
    def verdict(self) -> str:
        """How far the result is from float32, in one line."""
        kept = f", {', '.join(map(repr, self.keep_float32))} kept" if self.keep_float32 else ""
        region = f"{dtype_name(self.dtype)} on {self.device}{kept}"
        return f"{region}: the result is {self.output} from float32"

    def remarks(self) -> list[str]:
        """What else there is to say: the advice, and what was not measured."""
        lines = [] if self.advice is None else [str(self.advice)]
        if self.lost_in_float32:
            lines.append(
                f"not counted: {self.lost_in_float32:,} elements of the result that are infinite "
                "or NaN in float32 too"
            )
        if self.not_called:
            lines.append(f"not called, so not measured by themselves: {_few(self.not_called)}")
        notes: dict[str, list[str]] = {}
        for call in self.calls:
            notes.setdefault(call.note, []).append(call.label)
        lines += [f"{note}: {_few(labels)}" for note, labels in notes.items() if note]
        return [printable(line) for line in lines]

    def to_dict(self) -> dict[str, object]:
        """The report in the types that JSON has, keys in the order of the fields."""
        fields = plain(self)
        assert isinstance(fields, dict)
        return fields

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
