"""Looking up what autocast does to an operator."""

from __future__ import annotations

import torch

from ..errors import UnknownPolicyError
from .dispatcher import has_autocast, is_listed
from .kinds import Policy, Rule
from .tables import PRIVATE, TABLES, Table


def qualified(name: str, overload: str = "") -> str:
    """Name and overload as the dispatcher writes them: ``"aten::conv1d.padding"``."""
    return f"{name}.{overload}" if overload else name


def find(device_type: str, name: str, overload: str = "") -> Rule | None:
    """The rule that autocast on a device follows for an operator, or None where it has none.

    Args:
        device_type: device type of the region, such as ``"cpu"``.
        name: qualified name without overload, such as ``"aten::mm"``.
        overload: name of the overload, ``""`` for the default one.

    Returns:
        None where the operator falls through: the installed torch's dispatcher has no autocast
        kernel for it on this device, so that it runs in the dtypes it is given. (What it calls
        inside may still be autocast: see ``amp_script.lowering.composites``.)

    Raises:
        ValueError: the device type has no autocast in this torch.
        UnknownPolicyError: the dispatcher lists the operator for this device and no table says
            what it does.
    """
    operator = qualified(name, overload)
    if not is_listed(device_type, operator):
        return None
    namespace, _, local_name = operator.partition("::")
    rule = _table(device_type).get(local_name) if namespace == "aten" else None
    if rule is None:
        raise UnknownPolicyError(operator, device_type)
    return rule


def lookup(device_type: str, name: str, overload: str = "") -> Policy | None:
    """The kind of rule that :func:`find` returns, with the same arguments and errors."""
    rule = find(device_type, name, overload)
    return None if rule is None else rule.policy


def _table(device_type: str) -> Table:
    if device_type in TABLES:
        return TABLES[device_type]
    if device_type in ("privateuseone", torch._C._get_privateuse1_backend_name()):
        return PRIVATE
    assert has_autocast(device_type)
    return {}
