"""Input specs: an example tensor described in a few characters, such as ``ids=int64[0,100):1x128``.

The grammar, once::

    SPEC   =  [ NAME "=" ] [ DTYPE [ RANGE ] ":" ] SHAPE
    NAME   =  the name of a parameter of forward; without one the input is positional
    DTYPE  =  a name in DTYPES; float32 without one
    RANGE  =  "[" LOW "," HIGH ( ")" | "]" )        HIGH excluded or included
    SHAPE  =  SIZE { "x" SIZE }  |  "()"            "()" for a tensor without dimensions
    SIZE   =  an integer, at least 1

Values are drawn evenly from the range. Without one, floating-point values follow the standard
normal distribution and bool is either value; integers need a range, because what they index is not
known.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import torch

from amp_script.dtypes import dtype_name
from amp_script.errors import UsageError

__all__ = ["DTYPES", "Range", "TensorSpec", "parse"]

DTYPES: Final = {
    dtype_name(dtype): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class Range:
    """The values of a tensor: from ``low`` to ``high``, which belongs to it if ``closed``."""

    low: float
    high: float
    closed: bool


@dataclass(frozen=True)
class TensorSpec:
    """An example input: its name (None for a positional one), dtype, values and sizes."""

    name: str | None
    dtype: torch.dtype
    range: Range | None
    shape: tuple[int, ...]

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Return a CPU tensor of ``shape`` and ``dtype`` with values drawn by ``generator``."""
        if self.dtype is torch.bool:
            return torch.randint(2, self.shape, generator=generator).bool()
        if self.range is None:
            return torch.randn(self.shape, generator=generator).to(self.dtype)
        low, high, closed = self.range.low, self.range.high, self.range.closed
        if not self.dtype.is_floating_point:
            stop = int(high) + closed
            return torch.randint(int(low), stop, self.shape, generator=generator, dtype=self.dtype)
        part = torch.rand(self.shape, generator=generator, dtype=torch.float64)
        values = (low * (1 - part) + high * part).to(self.dtype)
        return values if closed else torch.where(values < high, values, low)


def parse(text: str) -> TensorSpec:
    """Read one spec.

    Raises:
        UsageError: naming the spec, the column, what was expected there and what was found.
    """
    reader = _Reader(text)
    name = reader.match(r"([^\W\d]\w*)=")
    dtype, values = torch.float32, None
    if not reader.ahead(r"\d|\(|x"):
        dtype, values = _dtype_and_range(reader)
    shape = _shape(reader)
    reader.end()
    return TensorSpec(name, dtype, values, shape)


class _Reader:
    """A text and how far it has been read."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def ahead(self, pattern: str) -> bool:
        return re.compile(pattern).match(self.text, self.position) is not None

    def match(self, pattern: str) -> str | None:
        """Step over ``pattern`` where it comes next and return its first group."""
        found = re.compile(pattern).match(self.text, self.position)
        if found is None:
            return None
        self.position = found.end()
        return found[1]

    def expect(self, pattern: str, expected: str) -> str:
        found = self.match(pattern)
        if found is None:
            raise self.error(expected)
        return found

    def end(self) -> None:
        if self.position < len(self.text):
            raise self.error("'x' and another size, or the end")

    def error(self, expected: str, *, at: int | None = None) -> UsageError:
        position = self.position if at is None else at
        rest = self.text[position:]
        found = f"found {rest!r}" if rest else "the spec ends"
        return UsageError(
            f"input spec {self.text!r}, column {position + 1}: expected {expected}, but {found}"
        )


def _dtype_and_range(reader: _Reader) -> tuple[torch.dtype, Range | None]:
    start = reader.position
    dtype = DTYPES.get(reader.match(r"([^\W\d]\w*)") or "")
    if dtype is None:
        raise reader.error(f"a size, or a dtype ({', '.join(DTYPES)})", at=start)
    values = None
    if dtype is torch.bool:
        reader.expect("(:)", "':' and the sizes (bool takes no range)")
    elif dtype.is_floating_point:
        values = _range(reader, dtype) if reader.ahead(r"\[") else None
        reader.expect("(:)", "'[' and a range, or ':' and the sizes")
    else:
        if not reader.ahead(r"\["):
            raise reader.error("a range after an integer dtype, such as [0,100)")
        values = _range(reader, dtype)
        reader.expect("(:)", "':' and the sizes")
    return dtype, values


def _range(reader: _Reader, dtype: torch.dtype) -> Range:
    reader.expect(r"(\[)", "'['")
    start = reader.position
    low = _number(reader, dtype)
    reader.expect("(,)", "',' and the upper end of the range")
    high = _number(reader, dtype)
    closed = reader.expect(r"([)\]])", "')' (upper end excluded) or ']' (included)") == "]"
    least, most = _limits(dtype)
    last = high if closed or dtype.is_floating_point else high - 1
    if low < least or last > most:
        raise reader.error(f"a range within {least} and {most}", at=start)
    first = torch.tensor(low, dtype=dtype).item()
    if first > high or (first == high and not closed):
        raise reader.error(f"a range with values of {dtype_name(dtype)} in it", at=start)
    return Range(low, high, closed)


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype.is_floating_point:
        return torch.finfo(dtype).min, torch.finfo(dtype).max
    # torch draws below an excluded end, which has to be an int64 as well.
    return torch.iinfo(dtype).min, min(torch.iinfo(dtype).max, torch.iinfo(torch.int64).max - 1)


def _number(reader: _Reader, dtype: torch.dtype) -> float:
    if not dtype.is_floating_point:
        return int(reader.expect(r"([-+]?\d+)", "an integer"))
    start = reader.position
    number = float(reader.expect(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)", "a number"))
    if not math.isfinite(number):
        raise reader.error("a finite number", at=start)
    return number


def _shape(reader: _Reader) -> tuple[int, ...]:
    if reader.match(r"(\(\))"):
        return ()
    sizes = [_size(reader)]
    while reader.match("(x)"):
        sizes.append(_size(reader))
    return tuple(sizes)


def _size(reader: _Reader) -> int:
    start = reader.position
    size = int(reader.expect(r"(\d+)", "a size"))
    if size == 0:
        raise reader.error("a size of at least 1", at=start)
    return size
