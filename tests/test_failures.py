"""Exceptions wherever a user's code may raise them: what is process-wide stays as it was."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import amp_script
from amp_script.errors import ComparisonError, ExportError
from amp_script.jit_state import AmbientState


class UserError(Exception):
    """Raised by the code under test."""


def _state() -> dict[str, Any]:
    """What a process or thread has one of, and amp-script touches in passing."""
    return {
        "autocast": AmbientState.current(),
        "jit pass": torch._C._jit_set_autocast_mode(torch._C._jit_set_autocast_mode(False)),
        "optimizing executor": torch._C._get_graph_executor_optimize(),
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "tracing": torch._C._get_tracing_state(),
        "random numbers": torch.get_rng_state().tolist(),
        "scripted calls": (torch._C.ScriptMethod.__call__, torch._C.ScriptFunction.__call__),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "hooks": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
    }


class Model(nn.Module):
    """Raises in its forward where it is told to."""

    def __init__(self, place: str = "") -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self._raise_at("before")
        y = self.first(x)
        with amp_script.autocast("cpu", enabled=False):
            self._raise_at("in a region")
            y = self.second(y.float())
        self._raise_at("after")
        return y

    def _raise_at(self, place: str) -> None:
        if place == self.place:
            raise UserError(place)


def _raise(*args: object) -> None:
    raise UserError("in a hook")


def _with_hook(register: Callable[[nn.Module], Callable[..., Any]]) -> Model:
    model = Model()
    register(model.second)(_raise)
    return model


MODELS: dict[str, Callable[[], Model]] = {
    "before": lambda: Model("before"),
    "in a region": lambda: Model("in a region"),
    "after": lambda: Model("after"),
    "forward hook": lambda: _with_hook(lambda layer: layer.register_forward_hook),
    "forward pre-hook": lambda: _with_hook(lambda layer: layer.register_forward_pre_hook),
}

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    before, inside = _state(), {name: value.clone() for name, value in model.state_dict().items()}
    names, hooks = dict(vars(model)), [dict(each._forward_hooks) for each in model.modules()]
    yield
    assert _state() == before
    assert all(torch.equal(inside[name], value) for name, value in model.state_dict().items())
    assert dict(vars(model)) == names
    assert [dict(each._forward_hooks) for each in model.modules()] == hooks


USES: dict[str, Callable[[nn.Module], object]] = {
    "trace_and_freeze": lambda model: amp_script.trace_and_freeze(model, X),
    "export": lambda model: amp_script.export(model, X),
    "compare_layers": lambda model: amp_script.compare_layers(model, X),
    "verify": lambda model: amp_script.verify(_frozen(), model, X),
}


@functools.cache
def _frozen() -> torch.jit.ScriptModule:
    return amp_script.trace_and_freeze(Model().eval(), X)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ambient", [False, True])
def test_a_model_that_raises(
    make: Callable[[], Model], use: Callable[[nn.Module], object], ambient: bool
) -> None:
    model, _ = make().eval(), _frozen()
    with (
        torch.autocast("cpu", dtype=torch.float16, enabled=ambient),
        _left_as_it_was(model),
        pytest.raises((UserError, ComparisonError, ExportError), match=r"in a|before|after"),
    ):
        use(model)
    # Nor does what failed keep from doing the same with a model that does not raise.
    amp_script.trace_and_freeze(Model().eval(), X)


@pytest.mark.parametrize("place", ["before", "in a region", "after", "forward hook"])
def test_an_eager_region_that_is_left_by_an_exception(place: str) -> None:
    model = MODELS[place]().eval()
    before = _state()
    with pytest.raises(UserError), amp_script.autocast("cpu", dtype=torch.bfloat16):
        model(X)
    assert _state() == before


class Raises(nn.Module):
    """Scripted, raises in a region, below it, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, where: int) -> torch.Tensor:
        y = self.layer(x)
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                if where == 1:
                    raise ValueError("in a region")
                y = torch.mm(y, y.t())
            if where == 2:
                y = torch.mm(y, torch.ones(3, 3))
        return y


@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("where", [1, 2])
def test_a_scripted_program_that_raises(where: int, ambient: bool) -> None:
    scripted = amp_script.script(Raises())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient):
        want = scripted(X, 0)
        with _left_as_it_was(scripted), pytest.raises((RuntimeError, torch.jit.Error)):
            scripted(X, where)
        assert torch.equal(scripted(X, 0), want)


def test_a_backward_that_raises() -> None:
    scripted = amp_script.script(Raises())
    before = _state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = scripted.layer(X)
    y.register_hook(_raise)
    with pytest.raises(UserError):
        y.float().sum().backward()
    assert _state() == before
