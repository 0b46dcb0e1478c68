"""What a lowered program calls: autocast's rules, written once in TorchScript.

A lowered graph holds a call of one of these functions where eager autocast would act. They use
operators of libtorch alone and are saved with the program, once each, so that a saved file needs
nothing else and its code stays readable.

In all of them ``target`` is the number of the dtype to cast to, or -1 where autocast is off, which
lets one value stand for the state of a region that is known only while running.
"""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch

from .. import policy
from ._graph import compiled_function

Function = torch._C.ScriptFunction

PREFIX = "__torch__.amp_script."
"""How the qualified names of these functions, and of lowered copies, begin."""

_ASKED_BY_FLAG = frozenset({"cpu", "cuda", "xpu", "mps", "mtia", "maia", "ipu", "xla"})
"""Device types for which TorchScript has an attribute such as ``x.is_cuda``."""

_ELIGIBLE = "x.is_floating_point() and x.dtype != torch.float64 and ({on_device})"

_CACHED = """x.requires_grad and x.is_leaf and x.dtype == torch.float32"""

_ADD_TO_CACHE = {
    # The cached cast is differentiable although it is made where gradients are off.
    True: """\
                grad = torch.is_grad_enabled()
                torch.set_grad_enabled(True)
                cache[x] = x.to(target)
                torch.set_grad_enabled(grad)""",
    False: """\
                cache[x] = x.to(target)""",
}

_SOURCES = {
    "cast": """
def cast(x: Tensor, target: int) -> Tensor:
    if target >= 0 and x.dtype != target and {eligible}:
        x = x.to(target)
    return x
""",
    "cast_cached": """
def cast_cached(x: Tensor, target: int, cache: Dict[Tensor, Tensor]) -> Tensor:
    if target >= 0 and x.dtype != target and {eligible}:
        if {cached}:
            if x not in cache:
{add_to_cache}
            x = cache[x]
        else:
            x = x.to(target)
    return x
""",
    "cast_again": """
def cast_again(x: Tensor, before: Tensor, target: int) -> Tensor:
    return cast(x, target) if x.requires_grad else before
""",
    "cast_again_cached": """
def cast_again_cached(
    x: Tensor, before: Tensor, target: int, cache: Dict[Tensor, Tensor]
) -> Tensor:
    return cast_cached(x, target, cache) if x.requires_grad else before
""",
    "cast_optional": """
def cast_optional(x: Optional[Tensor], target: int) -> Optional[Tensor]:
    return None if x is None else cast(x, target)
""",
    "cast_optional_cached": """
def cast_optional_cached(
    x: Optional[Tensor], target: int, cache: Dict[Tensor, Tensor]
) -> Optional[Tensor]:
    return None if x is None else cast_cached(x, target, cache)
""",
    "cast_list": """
def cast_list(xs: List[Tensor], target: int) -> List[Tensor]:
    return [cast(x, target) for x in xs]
""",
    "cast_list_cached": """
def cast_list_cached(
    xs: List[Tensor], target: int, cache: Dict[Tensor, Tensor]
) -> List[Tensor]:
    return [cast_cached(x, target, cache) for x in xs]
""",
    "widest": """
def widest(x: Tensor, so_far: int, target: int) -> int:
    if target >= 0 and {eligible}:
        if so_far == torch.float32 or x.dtype == torch.float32:
            so_far = torch.float32
        elif so_far != target or x.dtype != target:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return so_far
""",
    "widest_of_list": """
def widest_of_list(xs: List[Tensor], so_far: int, target: int) -> int:
    for x in xs:
        so_far = widest(x, so_far, target)
    return so_far
""",
    "float32_unless_given": """
def float32_unless_given(x: Tensor, given: Optional[int], target: int) -> Optional[int]:
    if given is None and target >= 0 and {eligible}:
        given = torch.float32
    return given
""",
    "float32_or_own": """
def float32_or_own(x: Tensor, target: int) -> int:
    return torch.float32 if target >= 0 and {eligible} else x.dtype
""",
    "refuse": """
def refuse(message: str, target: int) -> None:
    if target >= 0:
        raise RuntimeError(message)
""",
}
"""Functions about tensors, made once for each device type."""

_GENERIC_SOURCES = {
    "region_target": """
def region_target(enabled: bool, dtype: int, supported: List[int], warning: str) -> int:
    if enabled and dtype not in supported:
        warnings.warn(warning)
        enabled = False
    return dtype if enabled else -1
""",
    "is_on": """
def is_on(target: int) -> bool:
    return target >= 0
""",
    "instead": """
def instead(dtype: int, target: int) -> int:
    return dtype if target >= 0 else -1
""",
    "dtype_of": """
def dtype_of(device: str, names: List[str], dtypes: List[int]) -> int:
    if device not in names:
        raise RuntimeError("there is no autocast on device type '" + device + "'")
    return dtypes[names.index(device)]
""",
    "int_or": """
def int_or(given: Optional[int], default: int) -> int:
    return default if given is None else given
""",
    "bool_or": """
def bool_or(given: Optional[bool], default: bool) -> bool:
    return default if given is None else given
""",
    "inside_if": """
def inside_if(device: str, name: str, inside: int, outside: int) -> int:
    return inside if device == name else outside
""",
}
"""Functions about states, the same for all device types."""

_CALLS = {
    "cast_again": ("cast",),
    "cast_again_cached": ("cast_cached",),
    "cast_optional": ("cast",),
    "cast_optional_cached": ("cast_cached",),
    "cast_list": ("cast",),
    "cast_list_cached": ("cast_cached",),
    "widest_of_list": ("widest",),
}


@lru_cache(maxsize=None)
def helper(name: str, device_type: str = "") -> Function:
    """The function of that name, compiled on first use.

    Args:
        name: a key of the tables above.
        device_type: device type of the regions that a function about tensors is for.
    """
    scope: dict[str, object] = {"torch": torch, "warnings": warnings}
    if not device_type:
        return compiled_function(PREFIX + name, _GENERIC_SOURCES[name], scope)
    on_device = " or ".join(
        f"x.is_{each}" if each in _ASKED_BY_FLAG else f"x.device.type == '{each}'"
        for each in policy.eligible_device_types(device_type)
    )
    source = _SOURCES[name].format(
        eligible=_ELIGIBLE.format(on_device=on_device),
        cached=_CACHED,
        add_to_cache=_ADD_TO_CACHE[_cached_casts_are_differentiable()],
    )
    scope |= {called: helper(called, device_type) for called in _CALLS.get(name, ())}
    return compiled_function(f"{PREFIX}{device_type}.{name}", source, scope)


@lru_cache(maxsize=None)
def _cached_casts_are_differentiable() -> bool:
    """Whether eager autocast's cache holds casts with gradients from a block without them.

    Newer torch makes them so; older ones lose the weight's gradient for the rest of the region.
    """
    weight = torch.zeros(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        return torch.mm(weight, weight).requires_grad
