"""Regions made inside code that torch.compile or strict export traces.

Dynamo knows ``torch.autocast`` by identity and makes it a region of its graph; of any other class
it traces the methods, and the region is lost. So a region made while Dynamo traces is one of
torch's own. Instances made outside and decorated functions need nothing of this.

Private name used here, tried on torch 2.6, 2.13 and 2.14: the function attribute
``_torchdynamo_disable``, which is what ``torch.compiler.disable`` sets, without importing Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

__all__ = ["DYNAMO_TAKES_REGIONS", "region_in_compiled_code"]

DYNAMO_TAKES_REGIONS = torch.__version__ >= "2.12"
"""Whether Dynamo can trace a class whose ``__new__`` returns a ``torch.autocast``."""


def _refusal(message: str) -> Callable[[], NoReturn]:
    """Return a function at whose call Dynamo stops, with an error that shows ``message``.

    Dynamo drops the text of an exception that traced code raises, but it does name a function that
    it has been told not to trace. Without ``fullgraph`` it stops there too, and runs the caller
    eagerly, where the region needs no help.
    """

    def refuse() -> NoReturn:
        raise AssertionError(message)

    refuse.__qualname__ = message
    refuse._torchdynamo_disable = True  # type: ignore[attr-defined]  # functions take attributes
    return refuse


_refuse_version = _refusal(
    f"amp_script.autocast(...) inside compiled code: torch {torch.__version__} cannot compile it, "
    "2.12 and later can; make the instance outside the compiled code, decorate a function with it, "
    "or use torch.autocast there"
)
_refuse_subclass = _refusal(
    "a subclass of amp_script.autocast inside compiled code: what it adds would be lost; make the "
    "instance outside the compiled code, or use amp_script.autocast there"
)


def region_in_compiled_code(
    subclass: bool,
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
) -> torch.amp.autocast_mode.autocast:
    """Return a region that Dynamo takes into its graph; for the others' meaning see ``autocast``.

    Args:
        subclass: whether a subclass of our autocast is being made.
        device_type: of the region.
        dtype: of the region.
        enabled: whether the region casts.
        cache_enabled: whether the region caches casts.
    """
    if subclass:
        _refuse_subclass()
    if not DYNAMO_TAKES_REGIONS:
        _refuse_version()
    return torch.autocast(device_type, dtype, enabled, cache_enabled)
