"""What a saved file says about itself: one frozen dataclass, written as JSON inside the archive.

Reading is strict and runs no code: every field is checked for its type and an unknown one is
refused, so that a file either means exactly what it says or is not read at all.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

import torch

from amp_script.dtypes import dtype_name

__all__ = ["EXTRA_FILE", "SCHEMA_VERSION", "InputSpec", "Metadata", "Verification", "plain"]

SCHEMA_VERSION: Final = 2
"""Version of the JSON layout; a file with a higher one was written by a newer release."""

_ADDED: Final[Mapping[int, Mapping[str, object]]] = {2: {"keep_float32": []}}
"""Fields that a version added, with what they are in files of the versions before it."""

EXTRA_FILE: Final = "amp_script.json"
"""Name of the extra file in the TorchScript archive."""

Plan = Literal["native", "upcast"]
Kind = Literal["frozen", "scripted"]

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    dtype_name(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_PLANS: Final[Mapping[str, Plan]] = {"native": "native", "upcast": "upcast"}
_KINDS: Final[Mapping[str, Kind]] = {"frozen": "frozen", "scripted": "scripted"}


@dataclass(frozen=True)
class InputSpec:
    """One input of ``forward``, or one tensor inside a nested input.

    Attributes:
        name: the argument's name; inside a container with its path, such as ``"pair[0]"`` or
            ``"batch['ids']"``.
        dtype: the tensor's dtype; ``None`` for an input that is no tensor.
        shape: the example's sizes, ``None`` for a size known to vary; ``None`` as a whole where
            the number of dimensions may vary too, or for an input that is no tensor.
        device: device type, such as ``"cpu"``; ``None`` for an input that is no tensor.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int | None, ...] | None
    device: str | None = None

    @classmethod
    def of_tensor(cls, name: str, tensor: torch.Tensor) -> InputSpec:
        """The spec of an example tensor, with its sizes as they are."""
        return cls(name, tensor.dtype, tuple(tensor.shape), tensor.device.type)


@dataclass(frozen=True)
class Verification:
    """How far a program is from eager autocast on the inputs that it was made with.

    Attributes:
        bit_equal: every output equals eager autocast's to the bit.
        ulps: largest difference to eager autocast, in units in the last place; ``None`` where it
            could not be expressed as a finite number.
        distance: relative distance to float32 (norm of the difference over the norm).
        eager_distance: the same distance for eager autocast.
    """

    bit_equal: bool
    ulps: float | None
    distance: float | None
    eager_distance: float | None


@dataclass(frozen=True)
class Metadata:
    """All that a saved file says about itself.

    Attributes:
        kind: ``"frozen"`` for a frozen program, ``"scripted"`` for one with parameters.
        dtype: the region's dtype, ``None`` for a program that has no single one.
        device: device type that the program was made for, such as ``"cpu"``.
        inputs: specs of ``forward``'s inputs in order; empty where none are known.
        compute: the plan that the stored graph holds.
        verification: result of the check that was made when the program was, if one was.
        keep_float32: patterns of the names of submodules that were kept in float32.
        oldest_libtorch: oldest release whose libtorch has every operator of the file, such as
            ``"1.10"``; ``None`` where an operator's age is not known.
        lite_interpreter: whether the lite interpreter takes the file's program.
        torch_version: the torch that wrote the file.
        schema_version: version of this layout.
    """

    kind: Kind
    dtype: torch.dtype | None
    device: str
    inputs: tuple[InputSpec, ...] = ()
    compute: Plan = "native"
    verification: Verification | None = None
    keep_float32: tuple[str, ...] = ()
    oldest_libtorch: str | None = None
    lite_interpreter: bool | None = None
    torch_version: str = torch.__version__
    schema_version: int = SCHEMA_VERSION

    def on_device(self, device_type: str) -> Metadata:
        """The same for a program that was moved, its inputs with it."""
        moved = (
            spec if spec.device is None else dataclasses.replace(spec, device=device_type)
            for spec in self.inputs
        )
        return dataclasses.replace(self, device=device_type, inputs=tuple(moved))

    def to_json(self) -> str:
        """The metadata as a JSON object, keys in the order of the fields."""
        return json.dumps(plain(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Metadata:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: not JSON, a missing or unknown field, a value of the wrong type, or a
                schema version that this release does not know.
        """
        try:
            value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError("nested too deeply to be metadata") from None
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, found {type(value).__name__}")
        version = _integer(value.get("schema_version"), "schema_version")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"schema version {version} is newer than {SCHEMA_VERSION}, the newest that this "
                "release of amp-script reads"
            )
        if version < 1:
            raise ValueError(f"schema version {version} does not exist")
        return _record(cls, _upgraded(value, version), "metadata")


def _upgraded(value: Mapping[str, object], version: int) -> dict[str, object]:
    """What an older release wrote, as this one would have written it."""
    since = [fields for number, fields in _ADDED.items() if number > version]
    for name in (name for fields in since for name in fields if name in value):
        raise ValueError(f"metadata: has unknown {name!r} for schema version {version}")
    added = {name: default for fields in since for name, default in fields.items()}
    return {**value, **added, "schema_version": SCHEMA_VERSION}


def plain(value: object) -> object:
    """A dataclass of dtypes, numbers, strings and the like in the types that JSON has."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that metadata may hold")


# --- one reader a type: each takes the JSON value and its path, and refuses all else ------------

T = TypeVar("T")


def _wrong(value: object, path: str, expected: str) -> ValueError:
    return ValueError(f"{path}: expected {expected}, found {value!r:.80}")


def _integer(value: object, path: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong(value, path, "an integer")
    return value


def _number(value: object, path: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise _wrong(value, path, "a number")
    return float(value)


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, path, "true or false")
    return value


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _wrong(value, path, "a string")
    return value


def _one_of(choices: Mapping[str, T]) -> Callable[[object, str], T]:
    def read(value: object, path: str) -> T:
        if not isinstance(value, str) or value not in choices:
            raise _wrong(value, path, "one of " + ", ".join(sorted(choices)))
        return choices[value]

    return read


def _optional(read: Callable[[object, str], T]) -> Callable[[object, str], T | None]:
    return lambda value, path: None if value is None else read(value, path)


def _each(read: Callable[[object, str], T]) -> Callable[[object, str], tuple[T, ...]]:
    def read_all(value: object, path: str) -> tuple[T, ...]:
        if not isinstance(value, list):
            raise _wrong(value, path, "a list")
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read_all


def _record(cls: type[T], value: object, path: str) -> T:
    if not isinstance(value, dict):
        raise _wrong(value, path, "an object")
    readers = _READERS[cls]
    missing, unknown = readers.keys() - value.keys(), value.keys() - readers.keys()
    if missing or unknown:
        found = [f"lacks {name}" for name in sorted(missing)]
        found += [f"has unknown {name!r:.40}" for name in sorted(unknown)]
        raise ValueError(f"{path}: " + ", ".join(found))
    return cls(**{name: read(value[name], f"{path}.{name}") for name, read in readers.items()})


_READERS: Final[Mapping[type, Mapping[str, Callable[[object, str], object]]]] = {
    InputSpec: {
        "name": _text,
        "dtype": _optional(_one_of(_DTYPES)),
        "shape": _optional(_each(_optional(_integer))),
        "device": _optional(_text),
    },
    Verification: {
        "bit_equal": _flag,
        "ulps": _optional(_number),
        "distance": _optional(_number),
        "eager_distance": _optional(_number),
    },
    Metadata: {
        "kind": _one_of(_KINDS),
        "dtype": _optional(_one_of(_DTYPES)),
        "device": _text,
        "inputs": _each(lambda value, path: _record(InputSpec, value, path)),
        "compute": _one_of(_PLANS),
        "verification": _optional(lambda value, path: _record(Verification, value, path)),
        "keep_float32": _each(_text),
        "oldest_libtorch": _optional(_text),
        "lite_interpreter": _optional(_flag),
        "torch_version": _text,
        "schema_version": _integer,
    },
}
