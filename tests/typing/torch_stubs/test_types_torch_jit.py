"""torch.jit, as the stubs type it."""

import io
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List  # noqa: UP035

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from amp_script.typing import TypedScriptModule


class Net(nn.Module):
    width: torch.jit.Final[int]

    def __init__(self) -> None:
        super().__init__()
        self.width = 2

    def forward(self, x: Tensor, times: int = 1) -> Tensor:
        return x * times

    @torch.jit.export
    def exported(self, x: Tensor) -> int:
        return 1

    @torch.jit.ignore
    def ignored(self, x: Tensor) -> int:
        return 1

    @torch.jit.ignore(drop=False)
    def ignored_with_arguments(self, x: Tensor) -> int:
        return 1

    @torch.jit.unused
    def unused(self, x: Tensor) -> int:
        return 1


@torch.jit.interface
class Scores(nn.Module):
    @abstractmethod  # TorchScript wants the body to be pass
    def score(self, x: Tensor) -> float:
        pass


def double(x: Tensor, times: int = 2) -> Tensor:
    return x * times


def takes(module: torch.jit.ScriptModule) -> "torch.jit.ScriptModule[[Tensor], Tensor]":
    return torch.jit.script(Net())


def test_scripting() -> None:
    x = torch.ones(1)
    scripted = torch.jit.script(Net())
    assert_type(scripted(x, times=2), Tensor)
    assert_type(scripted.forward(x), Tensor)
    assert_type(scripted.eval()(x), Tensor)
    assert_type(takes(scripted)(x), Tensor)
    assert_type(scripted.code, str)
    assert_type(scripted.graph, torch.Graph)
    assert_type(torch.jit.script(scripted)(x), Tensor)

    function = torch.jit.script(double)
    assert_type(function(x, 2), Tensor)
    assert_type(function.code, str)
    assert_type(function.name, str)
    assert_type(function.graph, torch.Graph)

    net = Net()
    assert_type(net.width, int)
    assert_type(net.exported(x), int)
    assert_type(net.ignored(x), int)
    assert_type(net.ignored_with_arguments(x), int)
    assert_type(net.unused(x), int)


def test_tracing_and_freezing() -> None:
    x = torch.ones(1)
    traced = torch.jit.trace(Net().eval(), (x,))
    assert_type(traced(x), Tensor)
    assert_type(torch.jit.trace(double, x)(x), Tensor)
    assert_type(torch.jit.trace_module(Net(), {"forward": x})(x), Tensor)
    frozen = torch.jit.freeze(torch.jit.script(Net().eval()), preserved_attrs=["width"])
    assert_type(frozen(x), Tensor)
    assert_type(torch.jit.optimize_for_inference(torch.jit.script(Net().eval()))(x), Tensor)


def of_ours(module: TypedScriptModule[[Tensor], Tensor], x: Tensor) -> Tensor:
    return assert_type(torch.jit.freeze(module)(x), Tensor)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    scripted = torch.jit.script(Net())
    torch.jit.save(scripted, path, _extra_files={"note": "text"})
    loaded: torch.jit.ScriptModule = torch.jit.load(path, map_location=torch.device("cpu"))
    assert_type(loaded(torch.ones(1)), Any)
    assert_type(scripted.save_to_buffer(), bytes)
    torch.jit.load(io.BytesIO(scripted.save_to_buffer()))


def test_asynchronous_calls() -> None:
    x = torch.ones(1)
    assert_type(torch.jit.wait(torch.jit.fork(double, x, times=2)), Tensor)
    assert_type(torch.jit.fork(Net(), x).wait(), Tensor)


def by_interface(module: Scores) -> float:
    return assert_type(module.score(torch.ones(1)), float)


def refine(x: object) -> None:
    if torch.jit.isinstance(x, List[Tensor]):  # noqa: UP006  # what TorchScript reads
        assert_type(x, list[Tensor])


def test_marks() -> None:
    assert_type(torch.jit.annotate(Dict[str, int], {}), dict[str, int])  # noqa: UP006
    refine([torch.ones(1)])


if TYPE_CHECKING:
    assert_type(torch.jit.trace(torch.jit.script(Net()), torch.ones(1))(torch.ones(1)), Tensor)
    assert_type(torch.jit.Attribute([], List[int]), list[int])  # noqa: UP006
    torch.jit.script(Net())("x")  # E: mypy[arg-type] pyright[reportArgumentType]
    torch.jit.trace(double, torch.ones(1))()  # E: mypy[call-arg] pyright[reportCallIssue]
    torch.jit.freeze(Net())  # E: mypy[arg-type] pyright[reportArgumentType]
    torch.jit.save(Net(), "net.pt")  # E: mypy[arg-type] pyright[reportArgumentType]
    torch.jit.load(3)  # E: mypy[arg-type] pyright[reportArgumentType]
    torch.jit.fork(double, 1)  # E: mypy[call-overload] pyright[reportCallIssue, reportArgumentType]
    Net().exported(1)  # E: mypy[arg-type] pyright[reportArgumentType]
    Net().ignored()  # E: mypy[call-arg] pyright[reportCallIssue]
