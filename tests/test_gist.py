"""What an exception of others says, in one line."""

import pytest
import torch

from amp_script.gist import first_line, gist


@pytest.mark.parametrize(
    ("error", "first", "whole"),
    [
        (ValueError("it failed"), "it failed", "ValueError: it failed"),
        (RuntimeError("\n  it failed\n  here"), "it failed", "RuntimeError: it failed"),
        (KeyError(), "no message", "KeyError: no message"),
        (OSError(28, "No space left"), "[Errno 28] No space left", "OSError: [Errno 28] No space"),
    ],
)
def test_of_python(error: Exception, first: str, whole: str) -> None:
    assert first_line(error) == first
    assert gist(error).startswith(whole)


def test_of_a_torchscript_program() -> None:
    @torch.jit.script
    def program(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise ValueError("it failed")
        return x

    with pytest.raises(torch.jit.Error) as raised:
        program(torch.ones(2))
    assert gist(raised.value) == "builtins.ValueError: it failed"
