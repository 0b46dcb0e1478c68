from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch.amp.autocast_mode
from torch import dtype as _dtype
from typing_extensions import Self, deprecated

__all__ = ["autocast"]

_F = TypeVar("_F", bound=Callable[..., Any])

@deprecated(
    "`torch.cpu.amp.autocast(args...)` is deprecated. "
    "Please use `torch.amp.autocast('cpu', args...)` instead.",
    category=FutureWarning,
)
class autocast(torch.amp.autocast_mode.autocast):
    def __init__(
        self, enabled: bool = True, dtype: _dtype = ..., cache_enabled: bool = True
    ) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> Literal[False] | None: ...
    def __call__(self, func: _F) -> _F: ...
