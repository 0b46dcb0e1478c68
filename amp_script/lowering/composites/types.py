"""Types of operators' arguments as TorchScript reads them from an annotation."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

if TYPE_CHECKING:
    Number: TypeAlias = float
    """TorchScript's ``Scalar``; no operator here takes a complex one."""
else:
    # TorchScript knows its `Scalar` type by exactly this union, and not in the `|` notation.
    Number = Union[int, float, complex]  # noqa: UP007
