"""The oldest libtorch that reads a program, and the lite interpreter."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.jit.mobile import _load_for_lite_interpreter
from torch.nn import functional

import amp_script
from amp_script import compatibility
from amp_script.artifact import read_metadata
from amp_script.compatibility import oldest_libtorch, runs_in_lite_interpreter


class Program(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def graph_of(function: Callable[[torch.Tensor], torch.Tensor]) -> torch._C.Graph:
    module = torch.jit.trace(Program(function).eval(), torch.rand(2, 4, 8))
    return torch.jit.freeze(module).graph


@pytest.mark.parametrize(
    ("function", "release"),
    [
        (torch.relu, "1.5"),
        (functional.silu, "1.7"),
        # Operators with versioned semantics raise the version of the archive's format.
        (lambda x: x / x, "1.6"),
        (functional.gelu, "1.12"),
        # An argument that has its default is not written, so its age does not count.
        (lambda x: functional.scaled_dot_product_attention(x, x, x), "2.0"),
        (lambda x: functional.scaled_dot_product_attention(x, x, x, scale=0.5), "2.1"),
        (lambda x: functional.rms_norm(x, (8,)), "2.4"),
        (lambda x: functional.silu(functional.rms_norm(x, (8,))), "2.4"),
    ],
)
def test_the_newest_operator_decides(
    function: Callable[[torch.Tensor], torch.Tensor], release: str
) -> None:
    assert oldest_libtorch([graph_of(function)]) == release
    assert oldest_libtorch([graph_of(torch.relu), graph_of(function)]) == release


# Kept, because torch.compile of torch 2.9 fails once the library of an operator is gone.
ANOTHER_LIBRARY = torch.library.Library("amp_script_compatibility_test", "DEF")
ANOTHER_LIBRARY.define("twice(Tensor x) -> Tensor")
ANOTHER_LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


def test_an_operator_of_another_library_has_no_known_release() -> None:
    graph = graph_of(torch.ops.amp_script_compatibility_test.twice)
    assert oldest_libtorch([graph]) is None


def test_the_table_knows_the_operators_of_the_installed_torch() -> None:
    known = compatibility._ages().operators
    missing = {
        f"aten::{name}"
        for name in ("linear", "_convolution", "lstm.input", "layer_norm", "to.dtype", "add.str")
        if f"aten::{name}" not in known
    }
    assert not missing
    assert max(known.values()) >= (2, 6)


def test_autocast_in_a_program_needs_a_newer_libtorch_and_no_lite_interpreter() -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.transpose(1, 2)

    graph = torch.jit.script(region).inlined_graph
    oldest = oldest_libtorch([graph])
    assert oldest is not None
    assert compatibility._release(oldest) >= (2, 4)


class Attribute(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Region(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.transpose(1, 2)


def test_the_lite_interpreter_is_asked() -> None:
    assert runs_in_lite_interpreter([graph_of(torch.relu)]) is True
    region = torch.jit.script(Region())
    assert runs_in_lite_interpreter([region.graph]) is False
    attribute = torch.jit.freeze(torch.jit.script(Attribute().eval()), preserved_attrs=["scale"])
    assert runs_in_lite_interpreter([attribute.graph]) is True


@torch.jit.interface
class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


class Behind(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Attribute()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer.forward(x)


Behind.__annotations__ = {"layer": Layer}


def test_what_is_behind_an_interface_is_not_known() -> None:
    assert runs_in_lite_interpreter([torch.jit.script(Behind()).graph]) is None


class Counted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        return {"y": self.layer(x) * self.calls}


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.GRU(8, 8, bidirectional=True)
        self.last = torch.nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x)[0])


class Regions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with amp_script.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                x = self.layers(x)
        return x @ x.transpose(1, 2)


class PlainRegion(torch.nn.Module):
    """The cast of plain TorchScript asks for the autocast state, which the interpreter lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.transpose(1, 2)


X = torch.rand(2, 4, 8)


def frozen(model: torch.nn.Module, **options: Any) -> torch.jit.ScriptModule:
    return amp_script.trace_and_freeze(model.eval(), X, verify=False, **options)


ARTIFACTS: dict[str, Callable[[], torch.jit.ScriptModule]] = {
    "layers": lambda: frozen(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
    "recurrent": lambda: frozen(Tagger()),
    "state": lambda: frozen(Counted()),
    "preserved": lambda: frozen(torch.nn.Linear(8, 8), preserved_attrs=["weight"]),
    "scripted": lambda: amp_script.script(Regions()),
    "plain script": lambda: torch.jit.script(Counted()),
    "plain region": lambda: torch.jit.script(PlainRegion()),
}


@pytest.mark.filterwarnings("ignore:Lite Interpreter is deprecated")  # in torch 2.14 another kind
@pytest.mark.parametrize("name", ARTIFACTS)
def test_what_a_file_says_of_the_lite_interpreter_is_so(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    amp_script.save(ARTIFACTS[name](), path)
    claim = read_metadata(path).lite_interpreter
    assert claim is (name != "plain region")
    module: Any = torch.jit.load(path)
    if not claim:
        with pytest.raises(RuntimeError, match="not supported in mobile module"):
            module._save_to_buffer_for_lite_interpreter()
        return
    exported = io.BytesIO(module._save_to_buffer_for_lite_interpreter())
    given = _load_for_lite_interpreter(exported)(X)
    torch.testing.assert_close(given, module(X), rtol=0, atol=0)


def test_asking_leaves_the_program_whole() -> None:
    weight = torch.rand(8, 8)
    module = torch.jit.freeze(
        torch.jit.trace(Program(lambda x: x @ weight).eval(), torch.rand(8, 8))
    )
    expected = weight @ weight
    assert runs_in_lite_interpreter([module.graph]) is True
    assert torch.equal(module(weight), expected)
