"""What the installed torch's dispatcher lists for autocast.

The one module of the policies that asks private names: ``torch._C._dispatch_key_for_device``,
``_dispatch_has_kernel``, ``_dispatch_has_kernel_for_dispatch_key``,
``_dispatch_get_registrations_for_dispatch_key``, ``_jit_get_schemas_for_operator``,
``_get_privateuse1_backend_name`` and ``_is_autocast_available``; all are in torch 2.6 to 2.15.
"""

from __future__ import annotations

import torch

from ..devices import ROWS
from ..errors import ArgumentError


def has_autocast(device_type: str) -> bool:
    """Whether torch has autocast for the device type; False for a name that torch does not know."""
    try:
        return torch._C._is_autocast_available(device_type)
    except RuntimeError:
        return False


def autocast_key(device_type: str) -> str:
    """Name of the dispatch key that stands for autocast on the device type.

    Raises:
        ArgumentError: the device type has no autocast in this torch.
    """
    if not has_autocast(device_type):
        raise without_autocast(device_type)
    # The method answers for the private backend's own name as well as for "privateuseone".
    return "Autocast" + torch._C._dispatch_key_for_device(device_type)


def without_autocast(device_type: str) -> ArgumentError:
    """The error to raise for a device type without autocast; it names those that have it."""
    return ArgumentError(
        "device_type",
        f"{device_type!r}, which has no autocast in torch {torch.__version__}",
        f"one of {', '.join(autocast_device_types())}",
    )


def autocast_device_types() -> tuple[str, ...]:
    """The device types that have autocast in this torch, as torch names them."""
    named = (*ROWS, torch._C._get_privateuse1_backend_name())
    return tuple(device_type for device_type in named if has_autocast(device_type))


def is_listed(device_type: str, operator: str) -> bool:
    """Whether autocast on the device type has a kernel of its own for the operator.

    Args:
        device_type: such as ``"cpu"``.
        operator: qualified name with overload, such as ``"aten::conv1d.padding"``; one that the
            dispatcher does not know (``prim::`` nodes, operators of TorchScript alone) is not
            listed.
    """
    if not torch._C._dispatch_has_kernel(operator):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, autocast_key(device_type))


def listed_operators(device_type: str) -> tuple[str, ...]:
    """Every operator for which autocast on the device type has a kernel of its own, sorted."""
    key = autocast_key(device_type)
    return tuple(sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)))


def overload_names(name: str) -> tuple[str, ...]:
    """Names of the overloads of an operator, ``""`` for the default one; none if torch lacks it.

    Args:
        name: qualified name without overload, such as ``"aten::conv1d"``.
    """
    return tuple(schema.overload_name for schema in torch._C._jit_get_schemas_for_operator(name))
