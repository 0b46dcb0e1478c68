"""The dtype that ``torch.library.register_autocast`` set up for an operator.

torch keeps it in two places: on the ``CustomOpDef`` of an operator made by
``torch.library.custom_op``, and in the closure of the kernel of one made in another way. Private
names used, all of which may be absent: ``torch._library.custom_ops.OPDEFS`` and
``CustomOpDef._autocast_dtype`` (by device type; in older versions ``_autocast_cpu_dtype`` and
``_autocast_cuda_dtype``), ``OpOverload.py_kernels``. torch 2.6 has no
``register_autocast``. Where torch keeps the dtype in a third place, the operator counts as unknown,
and lowering refuses it until it is registered.
"""

from __future__ import annotations

import inspect

import torch
from torch._library.custom_ops import OPDEFS

from .dispatcher import autocast_key


def registered_cast_dtype(device_type: str, operator: str) -> torch.dtype | None:
    """The dtype to which autocast on the device casts, or None if it was not set up in this way.

    Args:
        device_type: device type of the region.
        operator: qualified name, with its overload if it has one.
    """
    name, _, overload = operator.partition(".")
    found = _of_definition(device_type, name) or _of_kernel(device_type, name, overload)
    return found if isinstance(found, torch.dtype) else None


def _of_definition(device_type: str, name: str) -> object:
    definition = OPDEFS.get(name)
    by_device = getattr(definition, "_autocast_dtype", {})
    return by_device.get(device_type) or getattr(definition, f"_autocast_{device_type}_dtype", None)


def _of_kernel(device_type: str, name: str, overload: str) -> object:
    namespace, _, local_name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), local_name)
    kernels = getattr(packet, overload or "default").py_kernels
    kernel = kernels.get(getattr(torch._C.DispatchKey, autocast_key(device_type), None))
    if not inspect.isfunction(kernel) or kernel.__module__ != torch.library.__name__:
        return None
    captured = inspect.getclosurevars(kernel).nonlocals
    return captured.get("cast_inputs") if captured.get("device_type") == device_type else None
