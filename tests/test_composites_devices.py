"""Dtypes on devices that are not here, by fake tensors.

Only kernels that consist of calls through the dispatcher alone can be watched: below any other,
fake tensors do as if autocast were off.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from composite_arguments import ARGUMENTS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_script import policy
from amp_script.lowering.composites import decompositions

DEVICE_TYPES = tuple(filter(policy.has_autocast, ("cuda", "xpu", "mps", "mtia")))

# Ask for values or layouts, which fake tensors do not have, or consist of an explicit kernel.
UNWATCHED = ("cov", "corrcoef", ".data", "sparse", "multigammaln", "matrix_exp")


def _watchable(operator: str) -> bool:
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, key) and not any(
        part in operator for part in UNWATCHED
    )


OPERATORS = [each for each in decompositions() if _watchable(each.operator)]


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
@pytest.mark.parametrize("composite", OPERATORS, ids=lambda each: each.operator)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dtypes_on_a_fake_device(composite: Any, device_type: str) -> None:
    operator = composite.operator
    if policy.is_listed(device_type, operator):
        pytest.skip("autocast on this device knows the operator itself")
    name, _, overload = operator.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, name), overload or "default")
    compared = 0
    for seed in range(12):
        arguments = ARGUMENTS[operator](random.Random(seed))
        with FakeTensorMode(allow_non_fake_inputs=True):
            want = _dtypes(function, arguments, device_type)
            got = _dtypes(composite.function, arguments, device_type)
        if want is not None and got is not None:
            assert got == want
            compared += 1
    if compared == 0:
        pytest.skip("fake tensors cannot run the operator")


def _dtypes(function: Any, arguments: Any, device_type: str) -> list[object] | None:
    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device_type)

    given = tree_map_only(torch.Tensor, fake, arguments)
    named = {}
    if isinstance(function, torch._ops.OpOverload):
        pairs = list(zip(function._schema.arguments, given, strict=True))
        named = {argument.name: value for argument, value in pairs if argument.kwarg_only}
        given = [value for argument, value in pairs if not argument.kwarg_only]
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, torch.float16)
    try:
        with torch.no_grad():
            results = function(*given, **named)
    except Exception:
        return None  # the operator, or fake tensors, do not take these arguments
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])
    return [
        (each.dtype, tuple(each.shape))
        for each in tree_leaves(results)
        if isinstance(each, torch.Tensor)
    ]
