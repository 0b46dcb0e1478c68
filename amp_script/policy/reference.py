"""The rules, carried out by hand: what each policy means, as code that runs with autocast off.

The observer compares the installed torch's autocast with this; so it is also the shortest exact
statement of the policies that the project has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .kinds import Policy, Rule, optional_dtype_arguments
from .tables import eligible_device_types

Arguments = Sequence[object]

_CAST = ("Tensor", "Optional[Tensor]", "List[Tensor]")
_PROMOTED_FROM = ("Tensor", "List[Tensor]")


def is_eligible(value: object, device_type: str) -> bool:
    """Whether autocast on the device type casts the value where a rule casts at all."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type in eligible_device_types(device_type)
    )


def call_by_rule(
    rule: Rule,
    operator: torch._ops.OpOverload,
    arguments: Arguments,
    device_type: str,
    region_dtype: torch.dtype,
) -> object:
    """Call an operator as autocast would by the rule, autocast being off.

    Args:
        rule: what autocast is taken to do.
        operator: the overload called.
        arguments: one value an argument, in the order of its schema, keyword-only ones included;
            arguments left off the end keep their defaults.
        device_type: device type of the region.
        region_dtype: dtype of the region.

    Raises:
        RuntimeError: where the rule refuses the call.
    """
    if rule.policy is Policy.REFUSED:
        raise RuntimeError(rule.message)
    if rule.policy is Policy.FLOAT32_OPTIONAL_DTYPE:
        return call(operator, _with_dtype(operator, arguments, device_type))
    if rule.policy is Policy.FLOAT32_APPENDED_DTYPE:
        return _call_with_appended_dtype(rule, operator, arguments, device_type)
    dtype = _cast_dtype(rule, operator, arguments, device_type, region_dtype)
    return call(operator, _with_casts(rule, operator, arguments, device_type, dtype))


def call(operator: torch._ops.OpOverload, arguments: Arguments) -> object:
    """Call an overload with one value an argument in the order of its schema."""
    positional: list[object] = []
    keywords: dict[str, object] = {}
    for argument, value in zip(operator._schema.arguments, arguments, strict=False):
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return operator(*positional, **keywords)


def with_defaults(schema: torch.FunctionSchema, arguments: Arguments) -> list[object]:
    """The arguments, followed by the defaults of those that were left off the end."""
    return [*arguments, *(a.default_value for a in schema.arguments[len(arguments) :])]


def _with_casts(
    rule: Rule,
    operator: torch._ops.OpOverload,
    arguments: Arguments,
    device_type: str,
    dtype: torch.dtype,
) -> Arguments:
    def cast(value: object) -> object:
        if isinstance(value, list):
            return [cast(item) for item in value]
        if isinstance(value, torch.Tensor) and is_eligible(value, device_type):
            return value.to(dtype)
        return value

    everything = rule.policy is Policy.CAST_INPUTS
    return [
        cast(value) if everything or str(argument.real_type) in _CAST else value
        for argument, value in zip(operator._schema.arguments, arguments, strict=False)
    ]


def _cast_dtype(
    rule: Rule,
    operator: torch._ops.OpOverload,
    arguments: Arguments,
    device_type: str,
    region_dtype: torch.dtype,
) -> torch.dtype:
    match rule.policy:
        case Policy.LOWER:
            return region_dtype
        case Policy.FLOAT32:
            return torch.float32
        case Policy.PROMOTE:
            return _widest(_promoted_from(operator, arguments), device_type, region_dtype)
        case Policy.CAST_INPUTS:
            assert rule.dtype is not None
            return rule.dtype
        case _:
            raise AssertionError(f"{rule.policy} does not cast arguments")


def _promoted_from(operator: torch._ops.OpOverload, arguments: Arguments) -> Iterator[torch.Tensor]:
    for argument, value in zip(operator._schema.arguments, arguments, strict=False):
        if str(argument.real_type) in _PROMOTED_FROM:
            for item in value if isinstance(value, list) else [value]:
                assert isinstance(item, torch.Tensor)
                yield item


def _widest(
    tensors: Iterator[torch.Tensor], device_type: str, region_dtype: torch.dtype
) -> torch.dtype:
    widest = region_dtype
    for tensor in tensors:
        if not is_eligible(tensor, device_type):
            continue
        if torch.float32 in (widest, tensor.dtype):
            widest = torch.float32
        elif not widest == tensor.dtype == region_dtype:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest


def _with_dtype(
    operator: torch._ops.OpOverload, arguments: Arguments, device_type: str
) -> Arguments:
    if not is_eligible(arguments[0], device_type):
        return arguments
    filled = with_defaults(operator._schema, arguments)
    for position in optional_dtype_arguments(operator._schema):
        if filled[position] is None:
            filled[position] = torch.float32
    return filled


def _call_with_appended_dtype(
    rule: Rule, operator: torch._ops.OpOverload, arguments: Arguments, device_type: str
) -> object:
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    dtype = torch.float32 if is_eligible(first, device_type) else first.dtype
    with_dtype = getattr(operator.overloadpacket, rule.overload)
    return call(with_dtype, [*with_defaults(operator._schema, arguments), dtype])
