"""What older versions of torch lack, and tests therefore leave out, each with its reason."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch

needs_register_autocast = pytest.mark.skipif(
    not hasattr(torch.library, "register_autocast"), reason="this torch has no register_autocast"
)

needs_newer_dynamo = pytest.mark.skipif(
    torch.__version__ < "2.10",
    reason="Dynamo of this torch cannot trace what this test records with",
)

loads_exported_programs = pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning"  # torch.export.load of torch 2.9
)

is_built_for_a_gpu_that_is_not_here = (
    torch.backends.cuda.is_built() and not torch.cuda.is_available()
)


@functools.cache
def exports_what_sets_attributes() -> bool:
    """Whether torch.export takes a module whose forward sets attributes, as recurrent layers do.

    Up to torch 2.9 it raises, and ``amp_script.export`` says so.
    """

    class Counting(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            torch.export.export(Counting(), (torch.ones(2),), strict=False)
        except ValueError:
            return False
    return True


def with_autocast(*device_types: str) -> list[str]:
    """Those of the device types that have autocast in this torch."""
    return [each for each in device_types if torch.amp.is_autocast_available(each)]


def keeps_casts_made_without_gradients() -> bool:
    """Whether eager autocast gives a cast that a block without gradients made to all others.

    So torch 2.6 does, whose weights then get no gradient.
    """
    weight = torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            torch.mm(weight, weight)
        return not torch.mm(weight, weight).requires_grad


def decorates_what_cannot_be_called() -> bool:
    """Whether ``torch.autocast`` takes any object for a function."""
    try:
        torch.autocast("cpu")(None)
    except TypeError:
        return False
    return True
