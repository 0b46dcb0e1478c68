# mypy: allow-untyped-defs, allow-incomplete-defs
# Private functions are as torch has them: untyped.
from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import torch.amp.autocast_mode
from torch import dtype as _dtype
from typing_extensions import Self, deprecated

__all__ = ["autocast", "custom_bwd", "custom_fwd"]

_F = TypeVar("_F", bound=Callable[..., Any])

@deprecated(
    "`torch.cuda.amp.autocast(args...)` is deprecated. "
    "Please use `torch.amp.autocast('cuda', args...)` instead.",
    category=FutureWarning,
)
class autocast(torch.amp.autocast_mode.autocast):
    def __init__(
        self, enabled: bool = True, dtype: _dtype = ..., cache_enabled: bool = True
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Literal[False] | None: ...
    def __call__(self, func: _F) -> _F: ...

@deprecated(
    "`torch.cuda.amp.autocast_mode._cast(value, dtype)` is deprecated. "
    "Please use `torch.amp.autocast_mode._cast(value, 'cuda', dtype)` instead.",
    category=FutureWarning,
)
def _cast(value, dtype): ...
@overload
@deprecated(
    "`torch.cuda.amp.custom_fwd(args...)` is deprecated. "
    "Please use `torch.amp.custom_fwd(args..., device_type='cuda')` instead.",
    category=FutureWarning,
)
def custom_fwd(fwd: _F, *, cast_inputs: _dtype | None = None) -> _F: ...
@overload
@deprecated(
    "`torch.cuda.amp.custom_fwd(args...)` is deprecated. "
    "Please use `torch.amp.custom_fwd(args..., device_type='cuda')` instead.",
    category=FutureWarning,
)
def custom_fwd(fwd: None = None, *, cast_inputs: _dtype | None = None) -> Callable[[_F], _F]: ...
@deprecated(
    "`torch.cuda.amp.custom_bwd(args...)` is deprecated. "
    "Please use `torch.amp.custom_bwd(args..., device_type='cuda')` instead.",
    category=FutureWarning,
)
def custom_bwd(bwd: _F) -> _F: ...
