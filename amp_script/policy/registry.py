"""Looking up what autocast does to an operator, and recording it for an operator of one's own."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType, TracebackType

import torch

from ..errors import PolicyError, UnknownPolicyError
from .dispatcher import autocast_device_types, autocast_key, has_autocast, is_listed, overload_names
from .kinds import Policy, Rule, optional_dtype_arguments
from .registered_casts import registered_cast_dtype
from .tables import PRIVATE, TABLES, Table

_Key = tuple[str, str]

_lock = threading.Lock()
_registered: Mapping[_Key, Rule] = MappingProxyType({})
"""Rules of third-party operators by device type and operator. Replaced, never changed, so that
reading takes no lock."""


def find(device_type: str, name: str, overload: str = "") -> Rule | None:
    """The rule that autocast on a device follows for an operator, or None where it has none.

    Asked in turn are the rules that :func:`register` recorded, the tables, and the casts that
    ``torch.library.register_autocast`` set up.

    Args:
        device_type: device type of the region, such as ``"cpu"``.
        name: qualified name without overload, such as ``"aten::mm"``.
        overload: name of the overload, ``""`` for the default one.

    Returns:
        None where the operator falls through: the installed torch's dispatcher has no autocast
        kernel for it on this device, so that it runs in the dtypes it is given. (What it calls
        inside may still be autocast.)

    Raises:
        ArgumentError: the device type has no autocast in this torch.
        UnknownPolicyError: the dispatcher lists the operator for this device and nothing on record
            says what it does.
    """
    operator = f"{name}.{overload}" if overload else name
    if not is_listed(device_type, operator):
        return None
    rule = (
        _registered.get((device_type, operator))
        or _tabled(device_type, operator)
        or _cast_by_torch_library(device_type, operator)
    )
    if rule is None:
        raise UnknownPolicyError(operator, device_type)
    return rule


def lookup(device_type: str, name: str, overload: str = "") -> Policy | None:
    """The kind of rule that :func:`find` returns, with the same arguments and errors."""
    rule = find(device_type, name, overload)
    return None if rule is None else rule.policy


class Registration:
    """A record that :func:`register` made. As a context manager it is undone on leaving."""

    def __init__(self, keys: Iterable[_Key]) -> None:
        """Hold the device types and operators that were recorded."""
        self._keys = frozenset(keys)

    def undo(self) -> None:
        """Take the record back; the second time there is nothing left to do."""
        global _registered
        with _lock:
            kept = {key: rule for key, rule in _registered.items() if key not in self._keys}
            _registered = MappingProxyType(kept)
            self._keys = frozenset()

    def __enter__(self) -> Registration:
        """Return the registration itself."""
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Undo the registration."""
        self.undo()


def register(
    operator: str, rule: Policy | Rule, *, device_types: Iterable[str] | None = None
) -> Registration:
    """Record what autocast does to a third-party operator.

    Nothing is changed in torch: this says what the operator's own autocast kernels do, so that a
    program with the operator can be lowered. An operator set up with
    ``torch.library.register_autocast`` needs no record.

    Args:
        operator: qualified name such as ``"torchvision::nms"``, for every overload of it, or with
            an overload: ``"mylib::op.out"``.
        rule: what autocast does; a plain :class:`Policy` where nothing belongs to it.
        device_types: the device types that this holds for; by default every one for which the
            operator has an autocast kernel.

    Returns:
        A handle whose ``undo()`` takes the record back. Recording the same rule again is allowed,
        and undone by the first handle.

    Raises:
        PolicyError: no such operator; it has no autocast kernel for a device type, so that eager
            autocast leaves it alone; its rule is on record already and differs; or the rule lacks
            what belongs to it.
        ArgumentError: a device type has no autocast in this torch.
    """
    rule = Rule(rule) if isinstance(rule, Policy) else rule
    keys = [
        (device_type, overload)
        for overload in _overloads(operator)
        for device_type in _device_types_for(overload, device_types)
    ]
    if not keys:
        raise PolicyError(
            operator,
            "it has no autocast kernel for any device type, so that eager autocast leaves it "
            "alone: there is nothing to record",
        )
    for _, overload in keys:
        _require_complete(overload, rule)
    return _record(keys, rule)


def _record(keys: Iterable[_Key], rule: Rule) -> Registration:
    global _registered
    with _lock:
        for device_type, overload in keys:
            known = _registered.get((device_type, overload)) or _tabled(device_type, overload)
            if known is not None and known != rule:
                raise PolicyError(overload, f"{known} is on record for {device_type!r}, not {rule}")
        new = {key: rule for key in keys if key not in _registered}
        _registered = MappingProxyType({**_registered, **new})
    return Registration(new)


def _overloads(operator: str) -> list[str]:
    namespace, separator, rest = operator.partition("::")
    if not (namespace and separator and rest):
        raise PolicyError(operator, 'expected a name such as "mylib::op" or "mylib::op.overload"')
    name, dot, overload = rest.partition(".")
    known = overload_names(f"{namespace}::{name}")
    if not known:
        raise PolicyError(operator, "torch knows no such operator; import its library first")
    if not dot:
        return [f"{operator}.{known_name}" if known_name else operator for known_name in known]
    if overload not in known:
        choices = ", ".join(repr(name) for name in known)
        raise PolicyError(operator, f"it has no such overload, but {choices}")
    return [operator]


def _device_types_for(operator: str, device_types: Iterable[str] | None) -> list[str]:
    if device_types is None:
        return [each for each in autocast_device_types() if is_listed(each, operator)]
    if isinstance(device_types, str):
        device_types = [device_types]
    wanted = list(device_types)
    for device_type in wanted:
        if not is_listed(device_type, operator):
            raise PolicyError(
                operator,
                f"it has no kernel for {autocast_key(device_type)}, so that eager autocast leaves "
                f"it alone on {device_type!r}: there is nothing to record",
            )
    return wanted


def _require_complete(operator: str, rule: Rule) -> None:
    missing = _missing(operator, rule)
    if missing:
        raise PolicyError(operator, f"{rule.policy.name} needs {missing}")


def _missing(operator: str, rule: Rule) -> str:
    name, _, overload = operator.partition(".")
    if rule.policy is Policy.CAST_INPUTS and rule.dtype is None:
        return "Rule.dtype, the dtype to cast to"
    if rule.policy is Policy.FLOAT32_APPENDED_DTYPE and not rule.overload:
        return "Rule.overload, the overload that takes a dtype"
    if rule.overload and rule.overload not in overload_names(name):
        return f"an overload that exists, not {rule.overload!r}"
    if rule.policy is Policy.FLOAT32_OPTIONAL_DTYPE:
        schema = torch._C._get_schema(name, overload)
        if not optional_dtype_arguments(schema):
            return f"an optional dtype, which `{schema}` does not take"
    return ""


def _tabled(device_type: str, operator: str) -> Rule | None:
    namespace, _, local_name = operator.partition("::")
    return _table(device_type).get(local_name) if namespace == "aten" else None


def _table(device_type: str) -> Table:
    if device_type in TABLES:
        return TABLES[device_type]
    if device_type in ("privateuseone", torch._C._get_privateuse1_backend_name()):
        return PRIVATE
    assert has_autocast(device_type)
    return {}


def _cast_by_torch_library(device_type: str, operator: str) -> Rule | None:
    dtype = registered_cast_dtype(device_type, operator)
    return None if dtype is None else Rule(Policy.CAST_INPUTS, dtype=dtype)
