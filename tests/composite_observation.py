"""Watching what operators call inside, through torch's profiler.

The profiler records every call that goes through the dispatcher, with overload, dtypes and what it
was called from. An operator without an autocast kernel of its own, below which one with such a
kernel is called in a dtype that autocast would change, is a composite.

What runs here are the CPU kernels. For another device type they tell the truth where the kernel is
shared: composite kernels, and those that torch's own list of native functions names for both.
"""

from __future__ import annotations

import functools
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchgen
import yaml
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile

from amp_script import policy
from amp_script.policy import Policy

DEVICE_TYPES = tuple(filter(policy.has_autocast, ("cpu", "cuda", "xpu", "mps", "mtia", "maia")))

# They promote their inputs the same way without autocast.
_PROMOTE_ALIKE = {"aten::cat", "aten::stack"}
_LOWER = (torch.bfloat16, torch.float16)
_COMPOSITE_KEYS = (
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


class Observation:
    """What was seen so far.

    Attributes:
        seen: operators that ran.
        reached: for an operator and a device type, the operators inside that autocast changes.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.reached: dict[tuple[str, str], set[str]] = defaultdict(set)

    def watch(self, calls: Callable[[], None]) -> None:
        """Run something, and look at what it called."""
        names = _ExperimentalConfig(capture_overload_names=True)
        with profile(record_shapes=True, experimental_config=names) as profiler, torch.no_grad():
            calls()
        for event in profiler.kineto_results.experimental_event_tree():
            self._walk(event)

    def _walk(self, event: Any) -> None:
        operator = _operator(event)
        self.seen.add(operator)
        for device_type in DEVICE_TYPES:
            if not _is_listed(operator, device_type) and _is_shared(operator, device_type):
                self.reached[operator, device_type].update(_changed_below(event, device_type))
        for inner in event.children:
            self._walk(inner)


def _operator(event: Any) -> str:
    overload = getattr(event, "overload_name", "")
    return f"{event.name}.{overload}" if overload else str(event.name)


def _changed_below(event: Any, device_type: str) -> Iterator[str]:
    for inner in event.children:
        operator = _operator(inner)
        if _is_listed(operator, device_type):
            if operator != _operator(event) and _changes(inner, operator, device_type):
                yield operator
        elif _is_shared(operator, device_type):
            yield from _changed_below(inner, device_type)


def _changes(event: Any, operator: str, device_type: str) -> bool:
    """Whether autocast changes a dtype of the operator's tensors."""
    name, _, overload = operator.partition(".")
    dtypes = set(_dtypes(event))
    lower = bool(dtypes.intersection(_LOWER))
    match policy.lookup(device_type, name, overload):
        case Policy.LOWER:
            return torch.float32 in dtypes
        case Policy.PROMOTE:
            return torch.float32 in dtypes and lower and operator not in _PROMOTE_ALIKE
        case _:
            return lower


def _dtypes(event: Any) -> Iterator[torch.dtype]:
    for value in getattr(event.extra_fields, "inputs", None) or ():
        for part in value if isinstance(value, list) else [value]:
            if hasattr(part, "dtype"):
                yield part.dtype


@functools.cache
def _is_listed(operator: str, device_type: str) -> bool:
    return policy.is_listed(device_type, operator)


@functools.cache
def _is_shared(operator: str, device_type: str) -> bool:
    if device_type == "cpu" or not operator.startswith("aten::"):
        return True
    if not torch._C._dispatch_has_kernel(operator):
        return False
    kernels = _native_functions().get(operator.removeprefix("aten::"), {})
    if "CPU" in kernels:
        return kernels.get(device_type.upper()) == kernels["CPU"]
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) for key in _COMPOSITE_KEYS
    )


@functools.cache
def _native_functions() -> dict[str, dict[str, str]]:
    """Kernels of each operator by dispatch key, as torch's own list of them says."""
    packaged = pathlib.Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    listed = yaml.load((packaged / "native_functions.yaml").read_text(), loader)
    return {
        each["func"].partition("(")[0]: {
            key.strip(): kernel
            for keys, kernel in (each.get("dispatch") or {}).items()
            for key in keys.split(",")
        }
        for each in listed
    }
