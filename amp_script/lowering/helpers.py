"""What a lowered program calls: autocast's rules, written once in TorchScript.

A lowered graph holds a call of one of these functions where eager autocast would act. They use
operators of libtorch alone and are saved with the program, once each, so that a saved file needs
nothing else and its code stays readable. None calls another: not everything in TorchScript inlines
calls inside calls.

In all of them ``target`` is the number of the dtype to cast to, or -1 where autocast is off, which
lets one value stand for the state of a region that is known only while running.
"""

from __future__ import annotations

import warnings
from functools import cache
from textwrap import indent

import torch

from .. import policy
from ..jit_state import in_a_new_thread
from ._graph import Function, compiled_function, dtypes_by_code

PREFIX = "__torch__.amp_script."
"""How the qualified names of these functions, and of lowered copies, begin."""

_ASKED_ABOUT = {
    # The dispatcher knows tensors in oneDNN's own layout by a key of their own, which has no
    # autocast.
    "cpu": "x.is_cpu and not x.is_mkldnn",
    **{name: f"x.is_{name}" for name in ("cuda", "xpu", "mps", "mtia", "maia", "ipu", "xla")},
}
"""How TorchScript asks where a tensor is; for other device types it compares their names."""

# Asked by dtype alone: torch.func.vmap has no rule for is_floating_point.
_ELIGIBLE = "(x.dtype == torch.float32 or x.dtype in {others}) and ({on_device})"

_CAST = """\
if target >= 0 and x.dtype != target and {eligible}:
    x = x.to(target)
"""

_CAST_CACHED = """\
if target >= 0 and x.dtype != target and {eligible}:
    if x.requires_grad and x.is_leaf and x.dtype == torch.float32:
        if x not in cache:
            grad = torch.is_grad_enabled()
            torch.set_grad_enabled({records})
            cache[x] = x.to(target)
            torch.set_grad_enabled(grad)
        x = cache[x]
    else:
        x = x.to(target)
"""
"""As in eager mode, the cache knows a tensor by its identity and forgets for which dtype it was."""

_CAST_RECORDED = _CAST_CACHED.replace(
    "if x.requires_grad and", "if x.requires_grad and torch.is_grad_enabled() and"
)
"""Without gradients a cast that is used once need not be kept, and would take memory."""

_WIDEST = """\
if target >= 0 and {eligible}:
    if so_far == torch.float32 or x.dtype == torch.float32:
        so_far = torch.float32
    elif so_far != target or x.dtype != target:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
"""


def _casts(suffix: str, cast: str, cache: str) -> dict[str, str]:
    """The functions that cast tensors, with the cache or without."""
    return {
        f"cast{suffix}": f"""
def cast{suffix}(x: Tensor, target: int{cache}) -> Tensor:
{indent(cast, "    ")}
    return x
""",
        f"cast_again{suffix}": f"""
def cast_again{suffix}(x: Tensor, before: Tensor, target: int{cache}) -> Tensor:
    if x.requires_grad:
{indent(cast, "        ")}
    else:
        x = before
    return x
""",
        f"cast_optional{suffix}": f"""
def cast_optional{suffix}(x: Optional[Tensor], target: int{cache}) -> Optional[Tensor]:
    if x is not None:
{indent(cast, "        ")}
    return x
""",
        f"cast_list{suffix}": f"""
def cast_list{suffix}(xs: List[Tensor], target: int{cache}) -> List[Tensor]:
    casts: List[Tensor] = []
    for x in xs:
{indent(cast, "        ")}
        casts.append(x)
    return casts
""",
    }


_SOURCES = {
    **_casts("", _CAST, ""),
    **_casts("_cached", _CAST_CACHED, ", cache: Dict[Tensor, Tensor]"),
    "cast_recorded": f"""
def cast_recorded(x: Tensor, target: int, cache: Dict[Tensor, Tensor]) -> Tensor:
{indent(_CAST_RECORDED, "    ")}
    return x
""",
    "widest": f"""
def widest(x: Tensor, so_far: int, target: int) -> int:
{indent(_WIDEST, "    ")}
    return so_far
""",
    "widest_of_list": f"""
def widest_of_list(xs: List[Tensor], so_far: int, target: int) -> int:
    for x in xs:
{indent(_WIDEST, "        ")}
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
}
"""Functions about tensors, made once for each device type."""

_GENERIC_SOURCES = {
    "refuse": """
def refuse(message: str, target: int) -> None:
    if target >= 0:
        raise RuntimeError(message)
""",
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
    "cache_if": """
def cache_if(cache: Dict[Tensor, Tensor], enabled: bool) -> Dict[Tensor, Tensor]:
    if not enabled:
        cache = torch.jit.annotate(Dict[Tensor, Tensor], {})
    return cache
""",
    "inside_if": """
def inside_if(device: str, name: str, inside: int, outside: int) -> int:
    return inside if device == name else outside
""",
}
"""Functions about states, the same for all device types."""


@cache
def helper(name: str, device_type: str = "") -> Function:
    """The function of that name, compiled on first use.

    Args:
        name: a key of the tables above.
        device_type: device type of the regions that a function about tensors is for.
    """
    names = {"torch": torch, "warnings": warnings}
    if not device_type:
        return compiled_function(PREFIX + name, _GENERIC_SOURCES[name], names)
    on_device = " or ".join(
        _ASKED_ABOUT.get(each, f"x.device.type == '{each}'")
        for each in policy.eligible_device_types(device_type)
    )
    source = _SOURCES[name].format(
        eligible=_ELIGIBLE.format(others=_lower_codes(), on_device=on_device),
        records="True" if cached_casts_are_differentiable() else "grad",
    )
    return compiled_function(f"{PREFIX}{device_type}.{name}", source, names)


def _lower_codes() -> list[int]:
    """Numbers of the eligible dtypes beside float32."""
    return [
        code
        for code, dtype in sorted(dtypes_by_code().items())
        if dtype.is_floating_point and dtype not in (torch.float32, torch.float64)
    ]


@cache
def cached_casts_are_differentiable() -> bool:
    """Whether eager autocast's cache holds casts with gradients from a block without them.

    Newer torch makes them so; older ones lose the weight's gradient for the rest of the region.
    """
    return in_a_new_thread(_cast_in_a_block_without_gradients_has_one)


def _cast_in_a_block_without_gradients_has_one() -> bool:
    weight = torch.zeros(1, 1, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        return torch.mm(weight, weight).requires_grad
