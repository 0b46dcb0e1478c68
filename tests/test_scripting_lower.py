"""Programs without their source: regions in files and compiled modules, and around them."""

from __future__ import annotations

import contextlib
import copy
import pickle
from pathlib import Path

import pytest
import torch
from agreement import assert_agrees, saved_and_loaded
from torch import nn

import amp_script
from amp_script.errors import ArgumentError, ArtifactError, LoweringError

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def _helper(x: torch.Tensor):
    with torch.autocast("cpu", enabled=False):
        y = torch.mm(x.float(), x.float())
    return y, torch.mm(x, x)


class WithRegions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, on: bool = True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            y = self.layer(x) * self.scale
            z = _helper(x)
            asked = torch.is_autocast_cpu_enabled()
        return y, z, asked, self.layer(x)


class Around(nn.Module):
    """What a region around a whole program does, in eager mode."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module, self.dtype = module, dtype

    def forward(self, *args: torch.Tensor):
        with torch.autocast("cpu", dtype=self.dtype):
            return self.module(*args)


pytestmark = pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled:DeprecationWarning")


def test_a_file(tmp_path: Path) -> None:
    module = WithRegions()
    torch.jit.script(module).save(tmp_path / "module.pt")
    lowered = amp_script.lower(tmp_path / "module.pt")
    assert isinstance(lowered, torch.jit.ScriptModule)
    assert_agrees(lowered, module, X)
    assert_agrees(lowered, module, X, False)
    again = saved_and_loaded(lowered)
    assert_agrees(again, module, X, ambient=(None,))
    for gone in ("autocast_mode", "is_autocast", "get_autocast_dtype"):
        assert gone not in str(again.inlined_graph)


def test_a_compiled_module_that_has_run_with_the_jit_pass() -> None:
    module = WithRegions()
    compiled = torch.jit.script(module)
    for _ in range(3):
        # An error at the first run, and silently without casts later.
        with contextlib.suppress(RuntimeError):
            compiled(X)
    code = compiled.code
    lowered = amp_script.lower(compiled)
    assert compiled.code == code
    assert lowered.layer.weight is compiled.layer.weight
    assert_agrees(lowered, module, X)
    assert_agrees(amp_script.script(compiled), module, X)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compile_", ["script", "trace", "freeze"])
def test_a_region_around_a_float32_program(
    tmp_path: Path, compile_: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv1d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Sigmoid()
    ).eval()
    x = X[None]
    if compile_ == "trace":
        compiled = torch.jit.trace(module, (x,))
    else:
        compiled = torch.jit.script(module)
        if compile_ == "freeze":
            compiled = torch.jit.freeze(compiled)
    compiled.save(tmp_path / "float32.pt")
    lowered = amp_script.lower(tmp_path / "float32.pt", dtype=dtype)
    assert_agrees(lowered, Around(module, dtype), x)
    assert_agrees(saved_and_loaded(lowered), Around(module, dtype), x, ambient=(None,))
    if compile_ != "freeze":
        assert_agrees(getattr(lowered, "0"), Around(module[0], dtype), x)


def test_a_region_around_a_program_with_regions() -> None:
    module = WithRegions()
    lowered = amp_script.lower(torch.jit.script(module), dtype=torch.float16)
    assert_agrees(lowered, Around(module, torch.float16), X)


def test_the_devices_own_dtype() -> None:
    module = nn.Linear(4, 4)
    lowered = amp_script.lower(torch.jit.script(module), device_type="cpu")
    assert_agrees(lowered, Around(module, torch.bfloat16), X)


def test_a_lowered_program_can_be_lowered_again(tmp_path: Path) -> None:
    module = WithRegions()
    amp_script.script(module).save(tmp_path / "lowered.pt")
    again = amp_script.lower(tmp_path / "lowered.pt")
    assert_agrees(again, module, X, ambient=(None,))


def test_copies_of_a_lowered_program() -> None:
    module = WithRegions()
    lowered = copy.deepcopy(amp_script.lower(torch.jit.script(module), dtype=torch.bfloat16))
    assert_agrees(lowered, Around(module, torch.bfloat16), X)


def test_two_files_with_the_same_names(tmp_path: Path) -> None:
    kinds = []
    for size in (3, 5):

        class Same(nn.Module):
            def __init__(self, size: int) -> None:
                super().__init__()
                self.layer = nn.Linear(4, size)

            def forward(self, x: torch.Tensor):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return self.layer(x)

        module = Same(size)
        torch.jit.script(module).save(tmp_path / f"{size}.pt")
        kinds.append((module, amp_script.lower(tmp_path / f"{size}.pt")))
    for module, lowered in kinds:
        assert_agrees(lowered, module, X)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"dtype": torch.float32},
            ArgumentError,
            "dtype is torch.float32, which autocast on 'cpu'",
        ),
        ({"device_type": "meta"}, ArgumentError, "'meta', which has no autocast"),
        ({"device_type": "no such"}, ArgumentError, "'no such', which has no autocast"),
    ],
)
def test_wrong_regions(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        amp_script.lower(torch.jit.script(nn.Linear(4, 4)), **arguments)


def test_what_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected a ScriptModule or the name of a file"):
        amp_script.lower(nn.Linear(4, 4))
    for read in (amp_script.lower, amp_script.load):
        for error in (ArtifactError, FileNotFoundError):
            with pytest.raises(error, match=r"missing\.pt: no such file") as caught:
                read(tmp_path / "missing.pt")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ArtifactError, match="a folder, not a file"):
        amp_script.lower(tmp_path)
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    with pytest.raises(RuntimeError):
        amp_script.lower(tmp_path / "broken.pt")


def _leaves_early(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n > 0:  # noqa: SIM102  # one condition is compiled rightly
            if n > 1:
                return x
        y = torch.mm(x, x)
    return y + 1


class LeavesEarly(nn.Module):
    def forward(self, x: torch.Tensor, n: int):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if n > 0:  # noqa: SIM102  # one condition is compiled rightly
                if n > 1:
                    return x
            y = torch.mm(x, x)
        return y + 1


class CallsWhatLeavesEarly(nn.Module):
    def forward(self, x: torch.Tensor, n: int):
        return _leaves_early(x, n)


@pytest.mark.parametrize("module", [LeavesEarly, CallsWhatLeavesEarly])
def test_what_plain_torchscript_got_wrong_is_refused(module: type[nn.Module]) -> None:
    with pytest.raises(LoweringError, match="early exit inside a with block") as caught:
        amp_script.lower(torch.jit.script(module()))
    assert "script" in caught.value.advice
    if module is LeavesEarly:
        assert 'with torch.autocast("cpu", dtype=torch.bfloat16):' in caught.value.source
        assert_agrees(amp_script.script(module()), module(), X, 2)


def test_frozen_programs_are_refused(tmp_path: Path) -> None:
    frozen = amp_script.trace_and_freeze(nn.Linear(4, 4).eval(), X)
    amp_script.save(frozen, tmp_path / "frozen.pt")
    for given in (frozen, tmp_path / "frozen.pt"):
        with pytest.raises(LoweringError, match="a frozen program, whose casts are explicit"):
            amp_script.lower(given, dtype=torch.bfloat16)


def test_other_files_are_named(tmp_path: Path) -> None:
    torch.save({"weight": X}, tmp_path / "checkpoint.pt")
    with pytest.raises(ArtifactError, match=r"checkpoint\.pt"):
        amp_script.lower(tmp_path / "checkpoint.pt")
