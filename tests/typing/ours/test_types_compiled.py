"""What compiling, freezing, saving and loading do to types: forward keeps its signature."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import amp_script
from amp_script.errors import TracingWarning
from amp_script.typing import HasForward, TypedScriptModule


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, times: int = 1) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y * times


class NetStub(torch.jit.ScriptModule):
    """What ``amp-script stubgen`` writes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class ShortStub(TypedScriptModule[[Tensor], tuple[Tensor, Tensor]]): ...


def double(x: Tensor, times: int = 2) -> Tensor:
    return x * times


def takes_script_module(module: torch.jit.ScriptModule) -> None: ...


def takes_any_forward(module: HasForward[[Tensor], tuple[Tensor, Tensor]]) -> None: ...


def test_scripting() -> None:
    x = torch.ones(1, 2)
    scripted = amp_script.script(Net())
    assert_type(scripted(x, times=3), tuple[Tensor, Tensor])
    assert_type(scripted.forward(x), tuple[Tensor, Tensor])
    assert_type(scripted.eval()(x), tuple[Tensor, Tensor])
    takes_script_module(scripted)
    annotated: TypedScriptModule[[Tensor, int], tuple[Tensor, Tensor]] = scripted
    assert isinstance(annotated, torch.jit.ScriptModule)


def test_scripting_functions() -> None:
    scripted = amp_script.script(double)
    assert_type(scripted(torch.ones(1), times=3), Tensor)

    @amp_script.script
    def decorated(x: Tensor) -> Tensor:
        return x + 1

    assert_type(decorated(torch.ones(1)), Tensor)


def test_scripting_what_has_no_types() -> None:
    scripted = amp_script.script(nn.Sequential(nn.ReLU()))
    result: Any = scripted(torch.ones(1))
    takes_script_module(scripted)
    assert isinstance(result, Tensor)


def freeze() -> TypedScriptModule[[Tensor], tuple[Tensor, Tensor]]:
    return amp_script.trace_and_freeze(Net().eval(), torch.ones(1, 2))


def test_freezing() -> None:
    x = torch.ones(1, 2)
    frozen = amp_script.trace_and_freeze(Net().eval(), (x,), dtype=torch.bfloat16)
    assert_type(frozen(x), tuple[Tensor, Tensor])
    takes_script_module(frozen)
    takes_any_forward(freeze())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracingWarning)
        assert_type(amp_script.trace_and_freeze(double, (x,))(x), Tensor)


def test_files(tmp_path: Path) -> None:
    x = torch.ones(1, 2)
    path = tmp_path / "net.pt"
    amp_script.save(freeze(), path)
    takes_script_module(amp_script.load(path))
    loaded = amp_script.load(path, like=NetStub)
    assert_type(loaded, NetStub)
    assert_type(loaded(x), tuple[Tensor, Tensor])
    assert_type(amp_script.load(str(path), like=ShortStub)(x), tuple[Tensor, Tensor])


if TYPE_CHECKING:
    load = amp_script.load
    net = amp_script.script(Net())
    net("x")  # E: mypy[arg-type] pyright[reportArgumentType]
    net(torch.ones(1), time=2)  # E: mypy[call-arg] pyright[reportCallIssue]
    amp_script.script(double)()  # E: mypy[call-arg] pyright[reportCallIssue]
    freeze()(1)  # E: mypy[arg-type] pyright[reportArgumentType]
    amp_script.trace_and_freeze(Net())  # E: mypy[call-overload] pyright[reportCallIssue]
    load("net.pt", like=Net)  # E: mypy[type-var] pyright[reportArgumentType, reportCallIssue]
    load("net.pt", like=NetStub)(1)  # E: mypy[arg-type] pyright[reportArgumentType]
    amp_script.save(Net(), "net.pt")  # E: mypy[arg-type] pyright[reportArgumentType]
    takes_any_forward(amp_script.script(double))  # E: mypy[arg-type] pyright[reportArgumentType]
