"""Types of operators' arguments as TorchScript reads them from an annotation."""

from __future__ import annotations

from typing import Union

# TorchScript knows its `Scalar` type by exactly this union, and not in the `|` notation.
Number = Union[int, float, complex]  # noqa: UP007
