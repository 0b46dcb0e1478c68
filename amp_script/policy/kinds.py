"""The kinds of thing eager autocast does to an operator, as values.

Every kind runs the operator with autocast of *that device* switched off for whatever the operator
calls inside, and casts *eligible* tensors only. A tensor is eligible for a region on a device when
it is floating point (``Tensor.is_floating_point()``: the float8 types too, complex ones not), not
float64, and lies on the device; the device types that count as "on the device" are in
:data:`amp_script.policy.tables.ELIGIBLE_DEVICE_TYPES`. What is cast: arguments of type ``Tensor``,
``Optional[Tensor]`` and ``List[Tensor]``. What is never cast: ``List[Optional[Tensor]]`` (the
indices of ``index_put``) and anything that is no tensor.

Source of the rules: ``ATen/autocast_mode.h`` as installed with torch 2.6 to 2.15, confirmed by
:mod:`amp_script.policy.observe`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from ..dtypes import dtype_name


class Policy(enum.Enum):
    """What eager autocast does when it meets an operator."""

    LOWER = "lower"
    """Cast every eligible argument to the region's dtype."""

    FLOAT32 = "float32"
    """Cast every eligible argument to float32."""

    FLOAT32_OPTIONAL_DTYPE = "float32, through the operator's optional dtype argument"
    """If the *first* argument is eligible, give float32 to every ``Optional[ScalarType]`` argument
    that the caller left at ``None``; a dtype the caller gave stays. No tensor is cast. If the first
    argument is not eligible (integer, bool, float64, complex, elsewhere), the call is unchanged."""

    FLOAT32_APPENDED_DTYPE = "float32, through an overload that takes a dtype"
    """Call another overload of the operator (:attr:`Rule.overload`), which takes the same
    arguments and a dtype after them: float32 if the first argument is eligible, else the first
    argument's own dtype. No tensor is cast."""

    PROMOTE = "promote"
    """Cast every eligible argument to the widest dtype among them, found by walking the ``Tensor``
    and ``List[Tensor]`` arguments in order of the schema (``Optional[Tensor]`` ones are not asked,
    but are cast). The walk starts at the region's dtype; an argument that is not eligible, or
    float64, changes nothing; float32 on either side gives float32 for the rest of the walk; both
    equal to the region's dtype stays; anything else raises ``RuntimeError``. So in a bfloat16
    region ``(float32, float16)`` gives float32, while ``(float16, float32)`` raises."""

    REFUSED = "refused"
    """Raise ``RuntimeError`` (:attr:`Rule.message`), whatever the dtypes of the arguments."""

    CAST_INPUTS = "cast to a registered dtype"
    """Cast every eligible argument, lists of any kind included, to :attr:`Rule.dtype`, whatever the
    dtype of the region: what ``torch.library.register_autocast`` does. Eager mode raises when such
    an operator is called with a keyword-only argument that differs from its default."""


@dataclass(frozen=True)
class Rule:
    """A policy with what belongs to it.

    Attributes:
        policy: the kind.
        dtype: for :attr:`Policy.CAST_INPUTS`, the dtype to cast to.
        message: for :attr:`Policy.REFUSED`, why and what to use instead.
        overload: for :attr:`Policy.FLOAT32_APPENDED_DTYPE`, the overload to call.
    """

    policy: Policy
    dtype: torch.dtype | None = None
    message: str = ""
    overload: str = ""

    def __str__(self) -> str:
        """Write the policy's name with what belongs to it, such as ``CAST_INPUTS(float16)``."""
        detail = dtype_name(self.dtype) if self.dtype else self.overload
        return f"{self.policy.name}({detail})" if detail else self.policy.name


def optional_dtype_arguments(schema: torch.FunctionSchema) -> tuple[int, ...]:
    """Positions in ``schema.arguments`` of the arguments of type ``Optional[ScalarType]``.

    TorchScript's own type for a dtype is ``int``, so the question is put to
    ``Argument.real_type``, which keeps ``ScalarType`` apart. Under
    :attr:`Policy.FLOAT32_OPTIONAL_DTYPE` each of them gets float32 where it is ``None``; every
    operator in the tables has exactly one.
    """
    return tuple(
        index
        for index, argument in enumerate(schema.arguments)
        if str(argument.real_type) == "Optional[ScalarType]"
    )
