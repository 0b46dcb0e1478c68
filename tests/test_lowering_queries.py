"""Questions about the autocast state inside programs, against eager mode."""

from __future__ import annotations

import pytest
import torch
from agreement import AMBIENT, assert_agrees, saved_and_loaded
from torch import nn

import amp_script

# What TorchScript compiles is deprecated in eager mode.
pytestmark = pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled:DeprecationWarning")

X = torch.rand(3, 3)


def everything(x: torch.Tensor, device: str = "cpu", on: bool = True):
    a = torch.is_autocast_cpu_enabled(), torch.is_autocast_enabled()
    b = torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype(device)
    with torch.autocast("cpu", dtype=torch.float16):
        c = torch.is_autocast_cpu_enabled(), torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            d = torch.is_autocast_cpu_enabled(), torch.get_autocast_dtype(device)
        with torch.autocast("cpu", enabled=on, dtype=torch.bfloat16):
            e = torch.is_autocast_cpu_enabled(), torch.get_autocast_dtype(device)
    return a, b, c, d, e, torch.get_autocast_dtype("cuda"), _asked(x)


def _asked(x: torch.Tensor):
    if torch.is_autocast_cpu_enabled():
        return torch.mm(x, x)
    return x


@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
@pytest.mark.parametrize("on", [True, False])
def test_answers_are_eager_modes(device: str, on: bool) -> None:
    assert_agrees(amp_script.script(everything), everything, X, device, on)


def test_answers_follow_the_callers_state() -> None:
    scripted = amp_script.script(_asked)
    for dtype in AMBIENT:
        assert_agrees(scripted, _asked, X, ambient=(dtype,))
    with torch.autocast("cpu", enabled=False):
        assert scripted(X).dtype == torch.float32


def test_a_default_dtype_that_the_thread_has_set_is_seen() -> None:
    def program(x: torch.Tensor):
        with torch.autocast("cpu"):
            return torch.mm(x, x), torch.get_autocast_dtype("cpu")

    scripted = amp_script.script(program)
    assert_agrees(scripted, program, X, ambient=(None,))
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert_agrees(scripted, program, X, ambient=(None,))
        # What is saved does not depend on the thread that scripts.
        again = amp_script.script(program)
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert_agrees(again, program, X, ambient=(None,))


def test_an_unknown_device_is_an_error_while_running() -> None:
    with pytest.raises(torch.jit.Error, match="there is no autocast on device type 'meta'"):
        amp_script.script(everything)(X, "meta")


def test_no_question_is_left_in_a_saved_program() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor):
            return everything(x)

    graph = str(saved_and_loaded(amp_script.script(Module())).inlined_graph)
    assert "is_autocast" not in graph
    assert "get_autocast_dtype" not in graph
