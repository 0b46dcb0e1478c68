"""What surrounds a model while it is traced, and what tracing held fast.

A trace records operators. What Python does with a tensor's values, such as a branch, happens once,
on the example. Torch warns of it at some lines and keeps silent at others, such as a loop over a
``range``; here each such place is noted with the line of the model's source and with what it
depends on: the *sizes* of the inputs, which other example inputs can check, or their *data*, which
none can.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, TextIO

import torch
from torch.jit._trace import TracerWarning

from amp_script.interception import replaced
from amp_script.lowering._graph import Value
from amp_script.tracer import is_recording, value_trace

__all__ = ["HeldFast", "depends_on_data", "trace_session"]


@dataclass(frozen=True)
class HeldFast:
    """A place where Python computed with the example inputs.

    Attributes:
        line: the model's source line, as ``file:line: text``.
        on_data: whether it depends on the values of the inputs, and not on their sizes alone.
    """

    line: str
    on_data: bool


@contextmanager
def trace_session() -> Iterator[list[HeldFast]]:
    """Surround one trace; yields the list to which places are added while it runs.

    One thread traces at a time. Torch's tracer warnings become entries of the list; other warnings
    pass.
    """
    with _one_at_a_time, _noting() as notes, ExitStack() as stack:
        for name in _CONVERSIONS:
            stack.enter_context(replaced(torch.Tensor, name, notes.convert))
        for name in _SUBSCRIPTS:
            stack.enter_context(replaced(torch.Tensor, name, notes.subscript))
        stack.enter_context(replaced(torch.Tensor, "__index__", notes.index))
        yield notes.places


_one_at_a_time = threading.RLock()

_CONVERSIONS: Final = (
    "__bool__",
    "__int__",
    "__float__",
    "__complex__",
    "item",
    "tolist",
    "numpy",
)
"""What makes a Python value of a tensor's values, and has torch warn of it."""

_SUBSCRIPTS: Final = ("__getitem__", "__setitem__")
"""What asks numbers for their ``__index__``, and records them after it."""


class _Notes:
    """Knows which tensor is being converted when torch warns of it."""

    def __init__(self) -> None:
        self.places: list[HeldFast] = []
        self._converted: torch.Tensor | None = None
        self._in_subscript = False

    def convert(
        self, original: Callable[..., object], tensor: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        """Stand for a method that makes a Python value."""
        before, self._converted = self._converted, tensor
        try:
            return original(tensor, *args, **kwargs)
        finally:
            self._converted = before

    def subscript(self, original: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Stand for a subscript of a tensor, all of which is recorded."""
        before, self._in_subscript = self._in_subscript, True
        try:
            return original(*args, **kwargs)
        finally:
            self._in_subscript = before

    def index(self, original: Callable[..., object], tensor: torch.Tensor) -> object:
        """Stand for ``__index__``, of which torch does not warn; note what nothing records."""
        if is_recording() and not self._in_subscript and not _is_given_to_an_operator(tensor):
            on_data = depends_on_data(tensor)
            if on_data or _depends_on_sizes(tensor):
                self._note(sys._getframe(1), on_data=on_data)
        return self.convert(original, tensor)

    def add(self, message: str, frame: FrameType | None) -> None:
        """Note that torch warned, in the frame."""
        if message.startswith("torch.tensor results"):
            return  # of a tensor it is recorded, and of Python values it is a constant as it says
        on_sizes = message.startswith(("Iterating over", "Using len"))
        self._note(frame, on_data=not on_sizes and depends_on_data(self._converted))

    def _note(self, frame: FrameType | None, *, on_data: bool) -> None:
        inner = _outside(frame, (_HERE, _WARNINGS))
        if not on_data and inner is not None and inner.f_code.co_filename.startswith(_TORCH):
            return  # torch's modules check sizes at every turn, and mean nothing by it
        outer = _outside(inner, (_HERE, _TORCH)) or inner
        if outer is not None:
            file, number = outer.f_code.co_filename, outer.f_lineno
            text = linecache.getline(file, number).strip()
            place = HeldFast(f"{file}:{number}: {text}", on_data)
            if place not in self.places:
                self.places.append(place)


@contextmanager
def _noting() -> Iterator[_Notes]:
    notes = _Notes()
    thread = threading.get_ident()
    with warnings.catch_warnings():
        warnings.simplefilter("always", TracerWarning)
        show = warnings.showwarning

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, TracerWarning) and threading.get_ident() == thread:
                notes.add(str(message), sys._getframe(1))
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = note
        yield notes


# --- what a value depends on ----------------------------------------------------------------------

_OF_SIZES: Final = frozenset({"aten::size", "aten::numel", "aten::dim", "aten::len"})


def depends_on_data(value: torch.Tensor | None) -> bool:
    """Whether a tensor being recorded leads back to an input other than through its sizes.

    Torch also warns of tensors changed in place while others look at them; there is no value then,
    and what they hold matters.
    """
    return value is None or not is_recording() or _leads_to_an_input(value, beyond=_OF_SIZES)


def _depends_on_sizes(value: torch.Tensor) -> bool:
    """Whether what does not depend on data depends on the sizes of inputs, not of weights alone."""
    return _leads_to_an_input(value, beyond=frozenset())


def _is_given_to_an_operator(number: torch.Tensor) -> bool:
    """Whether torch has recorded that an operator takes a number, and is about to ask for it."""
    readers = (use.user for use in value_trace(number).uses())
    return any(node.kind() == "aten::Int" and not node.output().uses() for node in readers)


def _leads_to_an_input(tensor: torch.Tensor, *, beyond: Collection[str]) -> bool:
    """Whether a tensor being recorded leads back to an input, other than by nodes of some kinds."""
    pending: list[Value] = [value_trace(tensor)]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        node = current.node()
        if current.unique() in seen or node.kind() in beyond:
            continue
        if node.kind() == "prim::Param" and current.type().kind() == "TensorType":
            return True
        seen.add(current.unique())
        pending.extend(node.inputs())
    return False


# --- whose line it is -----------------------------------------------------------------------------

_TORCH: Final = os.path.dirname(torch.__file__) + os.sep
_HERE: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep
_WARNINGS: Final = warnings.__file__


def _outside(frame: FrameType | None, folders: Sequence[str]) -> FrameType | None:
    """The innermost frame whose code lies in none of the folders."""
    while frame is not None and frame.f_code.co_filename.startswith(tuple(folders)):
        frame = frame.f_back
    return frame
