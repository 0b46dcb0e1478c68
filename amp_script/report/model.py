"""What a report says, as plain data, and how it is written: as text and as JSON."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import torch

from amp_script.dtypes import dtype_name
from amp_script.metadata import InputSpec, Metadata, Verification
from amp_script.tables import Table, size

from .tables import UNKNOWN, counts_table, submodule_label

__all__ = [
    "SCHEMA_VERSION",
    "Cast",
    "Counts",
    "Needs",
    "Operator",
    "Origin",
    "PrecisionReport",
    "Weights",
]

SCHEMA_VERSION: Final = 1
"""Version of the JSON layout: higher where a key means something else, or is gone."""

Origin = Literal["constant", "weight", "input", "activation"]
"""What is cast: a constant of the program, an attribute of a module, an input, or what the program
computes."""

Counts = Mapping["torch.dtype | None", int]
"""How many operators have their result in each dtype, the most frequent first. None stands for
those of which the program does not tell."""

T = TypeVar("T")


@dataclass(frozen=True)
class Operator:
    """One operator of the program: what makes or changes a tensor.

    Attributes:
        method: the method that it is in.
        name: name of its first result in the program, once a program.
        kind: qualified name, such as ``"aten::linear"``.
        dtype: dtype of its first result; None where the program does not tell.
        submodule: dotted name of the submodule that it belongs to, ``""`` for the module itself;
            None where the program does not tell.
        source: the line of the model's source, as ``file:line: text``, or ``""``.
        inputs: indices of the operators whose results it takes.
        operands: dtypes of the tensors that it takes; None where the program does not tell.
    """

    method: str
    name: str
    kind: str
    dtype: torch.dtype | None
    submodule: str | None
    source: str
    inputs: tuple[int, ...]
    operands: tuple[torch.dtype | None, ...]


@dataclass(frozen=True)
class Cast:
    """A cast that is left in the program, and made in every call.

    Attributes:
        operator: index of the operator that casts, in :attr:`PrecisionReport.operators`.
        before: dtype of what is cast; None where the program does not tell.
        after: dtype that it is cast to, where it is; None where the program does not tell.
        origin: what is cast.
        feeds: kinds of the operators that take the result; ``"output"`` where it is returned.
        conditional: whether the program decides when it runs, by the dtype that it meets.
    """

    operator: int
    before: torch.dtype | None
    after: torch.dtype | None
    origin: Origin
    feeds: tuple[str, ...]
    conditional: bool


@dataclass(frozen=True)
class Weights:
    """The tensors of one dtype that a program holds: constants, parameters and buffers.

    Attributes:
        tensors: how many; those that share memory count as one.
        size: bytes of memory.
    """

    tensors: int
    size: int


@dataclass(frozen=True)
class Needs:
    """What runs the program elsewhere.

    Attributes:
        oldest_libtorch: oldest release whose libtorch has every operator, such as ``"1.10"``; None
            where that is not known.
        lite_interpreter: whether the lite interpreter takes the program; None where that is not
            known.
        unrecorded_operators: operators of which it is not known which release has them.
    """

    oldest_libtorch: str | None
    lite_interpreter: bool | None
    unrecorded_operators: tuple[str, ...]


@dataclass(frozen=True)
class PrecisionReport:
    """Which operator of a program works in which dtype.

    Operators in branches and loops count as often as they are written there. Of a program that has
    a path of its own for calls that record gradients, the other path counts.

    Attributes:
        name: name of the class that the module was made of.
        kind: ``"frozen"`` where weights are constants of the program, else ``"scripted"``.
        operators: every operator in the order of the program, ``forward`` first.
        casts: the casts among them.
        weights: what the program holds, by dtype.
        compute: the plan that calls run; None for a module that has none.
        planned: how many operators that plan runs in float32 kernels. All else in the report is
            about the program as it is stored.
        gradient_operators: how many operators are in paths for calls that record gradients.
        metadata: what the file says about itself; None for a module without.
        needs: what runs the program elsewhere.
    """

    name: str
    kind: Literal["frozen", "scripted"]
    operators: tuple[Operator, ...]
    casts: tuple[Cast, ...]
    weights: Mapping[torch.dtype, Weights]
    compute: str | None
    planned: int
    gradient_operators: int
    metadata: Metadata | None
    needs: Needs

    @property
    def by_dtype(self) -> Counts:
        """The counts of all operators."""
        return _counts(self.operators)

    @property
    def by_kind(self) -> Mapping[str, Counts]:
        """Counts by kind of operator, the most frequent kind first."""
        groups = _grouped(self.operators, lambda operator: operator.kind)
        return dict(sorted(groups.items(), key=lambda group: (-sum(group[1].values()), group[0])))

    @property
    def by_submodule(self) -> Mapping[str | None, Counts]:
        """Counts by submodule, those inside it left out, in the order of the program."""
        return _grouped(self.operators, lambda operator: operator.submodule)

    def __str__(self) -> str:
        """The report for people, as tables in plain text."""
        return "\n\n".join(map(str, self.tables()))

    def tables(self) -> list[Table]:
        """The report for people, one table a subject; empty ones are left out."""
        merged = _alike_merged(self.by_submodule)
        tables = [
            Table("", ("", ""), self._facts()),
            counts_table("Operators by the dtype of their result", "operator", self.by_kind),
            counts_table("Operators by submodule", "submodule", merged),
            self._casts_table(),
            Table(
                "Weights",
                ("dtype", "tensors", "size"),
                [(dtype_name(d), str(w.tensors), size(w.size)) for d, w in self.weights.items()],
                numbers=2,
            ),
        ]
        return [table for table in tables if table.rows]

    def _facts(self) -> list[tuple[str, str]]:
        facts = [("module", f"{self.name}, {self.kind}")]
        if self.metadata is not None:
            facts += _said(self.metadata)
        if self.compute is not None:
            planned = f", {self.planned} operators in float32 kernels" if self.planned else ""
            facts.append(("compute plan", self.compute + planned))
        facts.append(("libtorch", _libtorch(self.needs)))
        facts.append(("lite interpreter", _TAKES[self.needs.lite_interpreter]))
        dtypes = ", ".join(f"{count} {dtype_name(dtype)}" for dtype, count in self.by_dtype.items())
        facts.append(("operators", f"{len(self.operators)}: {dtypes}" if dtypes else "none"))
        if self.gradient_operators:
            facts.append(
                ("with gradients", f"{self.gradient_operators} operators more, left out here")
            )
        facts.append(("casts left", str(len(self.casts))))
        return facts

    def _casts_table(self) -> Table:
        rows = Counter(
            (
                dtype_name(cast.before),
                dtype_name(cast.after) + (" if it must" if cast.conditional else ""),
                cast.origin,
                ", ".join(cast.feeds) or "nothing",
                self.operators[cast.operator].source or UNKNOWN,
            )
            for cast in self.casts
        )
        return Table(
            "Casts left",
            ("from", "to", "of", "for", "source", "casts"),
            [(*row, str(count)) for row, count in rows.most_common()],
            numbers=1,
        )

    def to_json(self) -> str:
        """The report as a JSON object.

        Its keys are ``schema_version``, ``name``, ``kind``, ``compute``, ``planned``,
        ``gradient_operators``, ``metadata`` (as in the file, or null), ``needs``, ``weights`` (by
        dtype the number of ``tensors`` and their ``bytes``), ``by_dtype`` (counts by dtype),
        ``by_kind`` and ``by_submodule`` (lists of objects with ``dtypes``, such counts), ``casts``
        and ``operators``, both with the names of the attributes here. A dtype is written as
        ``"bfloat16"``, and as ``"unknown"`` where the program does not tell; a submodule that it
        does not tell is null.
        """
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def to_dict(self) -> dict[str, object]:
        """The object that :meth:`to_json` writes."""
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "kind": self.kind,
            "compute": self.compute,
            "planned": self.planned,
            "gradient_operators": self.gradient_operators,
            "metadata": None if self.metadata is None else json.loads(self.metadata.to_json()),
            "needs": _plain(self.needs),
            "weights": {
                dtype_name(dtype): {"tensors": held.tensors, "bytes": held.size}
                for dtype, held in self.weights.items()
            },
            "by_dtype": _named(self.by_dtype),
            "by_kind": [
                {"kind": kind, "dtypes": _named(counts)} for kind, counts in self.by_kind.items()
            ],
            "by_submodule": [
                {"submodule": name, "dtypes": _named(counts)}
                for name, counts in self.by_submodule.items()
            ],
            "casts": [_plain(cast) for cast in self.casts],
            "operators": [_plain(operator) for operator in self.operators],
        }


def _plain(value: object) -> object:
    """A record or a value in it as JSON has it; in both a dtype may be None."""
    if isinstance(value, (Cast, Needs, Operator)):
        return {
            name: _named_dtypes(held) if name in _DTYPES else _plain(held)
            for name, held in vars(value).items()
        }
    return list(value) if isinstance(value, tuple) else value


_DTYPES: Final = frozenset({"after", "before", "dtype", "operands"})
"""Attributes that hold a dtype, or several."""


def _named_dtypes(value: torch.dtype | tuple[torch.dtype | None, ...] | None) -> object:
    return list(map(dtype_name, value)) if isinstance(value, tuple) else dtype_name(value)


def _counts(operators: Iterable[Operator]) -> Counts:
    return dict(Counter(operator.dtype for operator in operators).most_common())


def _grouped(operators: Iterable[Operator], key: Callable[[Operator], T]) -> dict[T, Counts]:
    groups: dict[T, list[Operator]] = defaultdict(list)
    for operator in operators:
        groups[key(operator)].append(operator)
    return {key: _counts(group) for key, group in groups.items()}


def _named(counts: Counts) -> dict[str, int]:
    return {dtype_name(dtype): count for dtype, count in counts.items()}


def _said(metadata: Metadata) -> list[tuple[str, str]]:
    """What a file says about itself."""
    facts = [("made for", f"{metadata.device}, {dtype_name(metadata.dtype, 'no one dtype')}")]
    if metadata.keep_float32:
        facts.append(("in float32", ", ".join(map(repr, metadata.keep_float32))))
    facts += [(f"input {spec.name}", _input(spec)) for spec in metadata.inputs]
    if metadata.verification is not None:
        facts.append(("verified", _verdict(metadata.verification)))
    facts.append(("written by", f"torch {metadata.torch_version}"))
    return facts


def _input(spec: InputSpec) -> str:
    if spec.dtype is None:
        return "no tensor"
    sizes = "any shape"
    if spec.shape is not None:
        sizes = "x".join("?" if size is None else str(size) for size in spec.shape) or "scalar"
    return f"{dtype_name(spec.dtype)} {sizes}"


def _verdict(verification: Verification) -> str:
    if verification.bit_equal:
        return "equal to eager autocast to the bit"
    distances = (verification.distance, verification.eager_distance)
    ours, eager = ("unknown" if found is None else f"{found:.3g}" for found in distances)
    return f"distance to float32 {ours}, eager autocast's {eager}"


_TAKES: Final = {True: "takes it", False: "does not take it", None: UNKNOWN}


def _libtorch(needs: Needs) -> str:
    if needs.oldest_libtorch is not None:
        return f"{needs.oldest_libtorch} or newer"
    return f"not known: no release on record has {', '.join(needs.unrecorded_operators)}"


def _alike_merged(counts: Mapping[str | None, Counts]) -> dict[str, Counts]:
    """Submodules with the same name but for numbers, and the same counts, as one."""
    groups: dict[tuple[str | None, tuple[object, ...]], list[str | None]] = defaultdict(list)
    for name, found in counts.items():
        pattern = None if name is None else re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        groups[pattern, tuple(sorted(_named(found).items()))].append(name)
    merged: dict[str, Counts] = {}
    for (pattern, _), names in groups.items():
        alone = len(names) == 1
        label = submodule_label(names[0] if alone else pattern)
        label += "" if alone else f"  (each of {len(names)})"
        while label in merged:  # the same pattern with other counts
            label += " "
        merged[label] = counts[names[0]]
    return merged
