"""Autocast regions in every place a program can have them, against eager mode."""

from __future__ import annotations

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import assert_agrees, assert_same, saved_and_loaded
from exit_programs import NESTED_EXITS, return_from_a_region_without_gradients
from torch import nn

import amp_script
from amp_script.errors import LoweringError
from amp_script.jit_state import AmbientState
from amp_script.lowering import lower_graph

X = torch.linspace(-1, 1, 16).reshape(4, 4)


def nested(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.mm(x, x)
        with torch.autocast("cpu", enabled=False):
            b = torch.mm(a.float(), x)
            with amp_script.autocast("cpu", dtype=torch.float16):
                c = torch.mm(b, x)
        d = torch.mm(b, x)
    return a, b, c, d, torch.mm(x, x)


def in_a_loop_with_break_and_continue(x: torch.Tensor, n: int = 5):
    # Plain TorchScript's compiler aborts where they lead out of a with statement.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(n):
            if i == 1:
                continue
            if i == 3:
                break
            x = torch.mm(x, x) / 2
    return torch.mm(x.float(), x.float())


def in_a_while_loop(x: torch.Tensor, n: int = 2):
    while n > 0:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.mm(x, x)
        n -= 1
    return x


def with_early_returns(x: torch.Tensor, n: int = 2):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, x)
        if n > 3:
            return y
    for i in range(n):
        with torch.autocast("cpu", dtype=torch.float16):
            x = torch.mm(x, x)
            if i == 1:
                return x
    return torch.mm(x.float(), y.float())


def in_branches(x: torch.Tensor, low: bool = True):
    if low:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(x, x)
    else:
        with torch.autocast("cpu", dtype=torch.float16):
            y = torch.mm(x, x)
    return y, torch.mm(x, x)


def one_object_reused(x: torch.Tensor):
    # Not torch's own, which cannot be entered again inside.
    region = amp_script.autocast("cpu", dtype=torch.bfloat16)
    with region:
        a = torch.mm(x, x)
    b = torch.mm(x, x)
    with region, torch.autocast("cpu", enabled=False), region:
        c = torch.mm(x, x)
    return a, b, c


def bound_by_as(x: torch.Tensor):
    with amp_script.autocast("cpu", dtype=torch.float16) as region:
        y = torch.mm(x, x)
    with region:
        z = torch.mm(x, x)
    return y, z, region.device, region.fast_dtype


def object_chosen_at_run_time(x: torch.Tensor, low: bool = True):
    on = torch.autocast("cpu", dtype=torch.bfloat16)
    off = torch.autocast("cpu", enabled=False)
    with on if low else off:
        y = torch.mm(x, x)
    with off if low else on:
        z = torch.mm(x, x)
    return y, z


def objects_in_a_list(x: torch.Tensor, i: int = 1):
    regions = [torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False)]
    with regions[i]:
        y = torch.mm(x, x)
    for region in regions:
        with region:
            x = torch.mm(x.float(), x.float())
    return x, y


def _make_region():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def object_from_a_function(x: torch.Tensor):
    with _make_region():
        return torch.mm(x, x)


def _product_in(x: torch.Tensor, region: torch.amp.autocast_mode.autocast):
    with region:
        return torch.mm(x, x)


def object_passed_to_a_function(x: torch.Tensor):
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    return _product_in(x, region), _product_in(x, torch.autocast("cpu", enabled=False))


def enabled_at_run_time(x: torch.Tensor, on: bool = False):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        y = torch.mm(x, x)
        with torch.autocast("cpu", enabled=not on):
            z = torch.mm(x, x)
    return y, z


def dtype_at_run_time(x: torch.Tensor, dtype: torch.dtype = torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        y = torch.mm(x, x)
        with torch.autocast("cpu"):
            z = torch.cat([torch.mm(x, x), y.float()])
    return y, z


def device_at_run_time(x: torch.Tensor, device: str = "cpu"):
    with torch.autocast(device, dtype=torch.bfloat16):
        return torch.mm(x, x)


def default_dtype_of_the_region_around(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.float16, enabled=False), torch.autocast("cpu"):
        y = torch.mm(x, x)
    with torch.autocast("cpu"):
        z = torch.mm(x, x)
    return y, z


def several_devices(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("xpu", dtype=torch.float16):
        a = torch.mm(x, x)
    with torch.autocast("xpu", dtype=torch.float16):
        b = torch.mm(x, x)
    return a, b


def other_context_managers(x: torch.Tensor):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        return torch.mm(x, x)


def deprecated_spelling(x: torch.Tensor):
    with torch.cpu.amp.autocast(dtype=torch.bfloat16):
        a = torch.mm(x, x)
    with torch.cpu.amp.autocast(enabled=False):
        return a, torch.mm(x, x)


def _helper(x: torch.Tensor):
    y = torch.mm(x, x)
    with torch.autocast("cpu", enabled=False):
        return y, torch.mm(x, x)


def called_from_a_region(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = _helper(x)
    return a, _helper(x)


PROGRAMS: list[Callable[..., Any]] = [
    nested,
    in_a_loop_with_break_and_continue,
    in_a_while_loop,
    with_early_returns,
    in_branches,
    one_object_reused,
    bound_by_as,
    object_chosen_at_run_time,
    objects_in_a_list,
    object_from_a_function,
    object_passed_to_a_function,
    enabled_at_run_time,
    dtype_at_run_time,
    device_at_run_time,
    default_dtype_of_the_region_around,
    several_devices,
    other_context_managers,
    called_from_a_region,
]

ARGUMENTS: dict[str, list[tuple[Any, ...]]] = {
    "in_a_loop_with_break_and_continue": [(0,), (1,), (7,)],
    "with_early_returns": [(0,), (2,), (5,)],
    "in_branches": [(False,)],
    "object_chosen_at_run_time": [(False,)],
    "objects_in_a_list": [(0,)],
    "enabled_at_run_time": [(True,)],
    "dtype_at_run_time": [(torch.bfloat16,)],
    "device_at_run_time": [("xpu",)],
}
"""Other arguments than the default ones."""


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_regions_are_as_in_eager_mode(program: Callable[..., Any]) -> None:
    scripted = amp_script.script(program)
    for arguments in [(), *ARGUMENTS.get(program.__name__, [])]:
        assert_agrees(scripted, program, X, *arguments)


def region_after_a_return(x: torch.Tensor, n: int):
    if n == 0:
        return x
    if n == 1:
        with torch.autocast("cpu", dtype=torch.float16):
            return torch.mm(x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, x)
    return torch.mm(y.float(), x)


def region_after_branches_of_which_one_goes_on(x: torch.Tensor, n: int):
    y = x
    if n < 2:
        y = torch.mm(x, x)
    else:
        return y
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(y, x)
    return y.relu()


def return_from_a_region(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if n == 0:
            return torch.mm(x, x)
        y = torch.mm(x, x)
        if n == 1:
            return y
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(y.float(), x)
    return torch.mm(y, x)


def loop_left_from_a_region(x: torch.Tensor, n: int):
    for i in range(3):
        if i == n + 1:
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = torch.mm(x, x)
            if i == n:
                continue
            x = torch.mm(x, x)
            if i == 2 * n:
                break
        x = torch.mm(x.float(), x.float())
    return x


@pytest.mark.parametrize("n", range(3))
@pytest.mark.parametrize(
    "program",
    [
        region_after_a_return,
        region_after_branches_of_which_one_goes_on,
        return_from_a_region,
        loop_left_from_a_region,
    ],
)
def test_regions_after_early_exits_on_which_plain_torchscript_aborts(
    program: Callable[..., Any], n: int
) -> None:
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        torch.jit.script(program)
    assert_agrees(amp_script.script(program), program, X, n)


@pytest.mark.parametrize("program", NESTED_EXITS, ids=lambda program: program.__name__)
def test_exits_that_may_happen_in_and_around_regions(program: Callable[..., Any]) -> None:
    scripted = amp_script.script(program)
    for n in range(-1, 5):
        assert_agrees(scripted, program, X, n)


@pytest.mark.parametrize("program", NESTED_EXITS, ids=lambda program: program.__name__)
def test_a_saved_program_has_the_same_exits(program: Callable[..., Any]) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, n: int):
            return program(x, n)

    scripted = amp_script.script(Module())
    loaded = saved_and_loaded(scripted)
    for n in range(-1, 5):
        assert_agrees(loaded, program, X, n, ambient=(None,))
        assert_agrees(scripted, program, X, n)


def test_a_mode_is_left_with_its_region_by_an_early_exit() -> None:
    scripted = amp_script.script(return_from_a_region_without_gradients)
    x = X.clone().requires_grad_()
    for n in range(3):
        got, want = scripted(x, n), return_from_a_region_without_gradients(x, n)
        assert torch.is_grad_enabled()
        assert got.requires_grad == want.requires_grad
        assert_same(got, want)


def _function_written_as(source: str, folder: Path) -> Callable[..., Any]:
    """The function ``f`` of a file that ends with it, which a formatter would make longer."""
    file = folder / "short.py"
    file.write_text(f"import torch\nfrom torch import Tensor\n{source}")
    function: Callable[..., Any] = runpy.run_path(str(file))["f"]
    return function


_MADE_BEFORE = """def f(x: Tensor):
 r = torch.autocast("cpu", dtype=torch.bfloat16)
 q = torch.autocast("cpu", enabled=False)
"""


@pytest.mark.parametrize(
    "source",
    [
        f"{_MADE_BEFORE} with r: return x@x",
        f"{_MADE_BEFORE} with r:return x",
        f"{_MADE_BEFORE} with r, q: return x@x",
        f"{_MADE_BEFORE} y = x\n with r:y=x@x\n return y",
        f"{_MADE_BEFORE} with r:\n  with q: return x@x\n",
    ],
)
def test_a_region_at_the_end_of_a_file(source: str, tmp_path: Path) -> None:
    function = _function_written_as(source, tmp_path)
    assert_agrees(amp_script.script(function), function, X)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("def f(r: Tensor):\n with r:r", "has no attribute or method '__exit__'"),
        ("def f(r: Tensor):\n with r:\n  r", "has no attribute or method '__exit__'"),
        ("def f(x: Tensor):\n with r:x", "undefined value r"),
    ],
)
def test_an_error_names_the_place_of_a_region_at_the_end_of_a_file(
    source: str, what: str, tmp_path: Path
) -> None:
    function = _function_written_as(source, tmp_path)
    with pytest.raises(RuntimeError, match=what) as error:
        amp_script.script(function)
    message = str(error.value)
    assert f'File "{tmp_path / "short.py"}"' in message
    assert "\n with r:" in message
    assert "\n      ~" in message


def test_an_error_names_the_line_of_a_region_with_exits() -> None:
    def wrong(x: torch.Tensor, n: int):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if n > 0:
                return x
            y = torch.mm(x, n)
        return y.relu()

    with pytest.raises(RuntimeError, match=r"y = torch.mm\(x, n\)"):
        amp_script.script(wrong)


def broken_by_plain_torchscript(x: torch.Tensor, n: int):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for i in range(n):
            if i == 1:
                return x
        y = torch.mm(x, x)
    return y.relu()


def test_what_plain_torchscript_broke_before_is_refused_with_its_line() -> None:
    def calling(x: torch.Tensor, n: int):
        return broken_by_plain_torchscript(x, n)

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, n: int):
            return broken_by_plain_torchscript(x, n)

    plain = torch.jit.script(Module())
    with pytest.raises(LoweringError, match="an early exit inside a with block") as caught:
        amp_script.script(calling)
    assert "with torch.autocast" in caught.value.source
    assert caught.value.advice
    with pytest.raises(LoweringError, match="so that y is used outside"):
        amp_script.lower(plain)


def _left_early(x: torch.Tensor, n: int):
    with torch.no_grad():
        if n > 0:
            x = x + 1
            if n > 1:
                return x
        y = torch.mm(x, x)
    return y.relu()


def test_what_was_compiled_for_something_that_does_not_compile_is_whole() -> None:
    def wrong(x: torch.Tensor, n: int):
        return _left_early(x, n).no_such_method()

    with pytest.raises(RuntimeError, match="no_such_method"):
        amp_script.script(wrong)
    plain = torch.jit.script(_left_early)
    torch._C._jit_pass_lint(plain.graph)
    for n in range(3):
        assert_same(plain(X, n), _left_early(X, n))
        assert torch.is_grad_enabled()


def test_the_deprecated_spelling_is_a_region() -> None:
    if sys.version_info >= (3, 13):
        with pytest.raises(TypeError, match="got builtin_function_or_method"):
            torch.jit.script(deprecated_spelling)
        pytest.skip("TorchScript there cannot read the class, which docs/limits.md says")
    scripted = amp_script.script(deprecated_spelling)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        assert_agrees(scripted, deprecated_spelling, X)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_saved_program_holds_no_region(program: Callable[..., Any]) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor):
            return program(x)

    loaded = saved_and_loaded(amp_script.script(Module()))
    text = str(loaded.inlined_graph)
    for gone in ("prim::Enter", "autocast_mode", "get_autocast_dtype", "is_autocast"):
        assert gone not in text.replace("no_grad", "") or program is other_context_managers
    assert_agrees(loaded, program, X, ambient=(None,))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_graph_inlined_by_torchscript_is_lowered_too(program: Callable[..., Any]) -> None:
    graph = torch.jit.script(program).graph.copy()
    torch._C._jit_set_autocast_mode(False)
    try:
        torch._C._jit_pass_inline(graph)
    finally:
        torch._C._jit_set_autocast_mode(True)
    lower_graph(graph, AmbientState.current())
    torch._C._jit_pass_lint(graph)
    function = torch._C.CompilationUnit().create_function("lowered", graph)
    defaults = [argument.default_value for argument in torch.jit.script(program).schema.arguments]
    assert_same(function(X, *defaults[1:]), program(X))


def test_constant_flags_leave_no_trace() -> None:
    code = amp_script.script(nested).code
    assert "enabled" not in code
    assert "region_target" not in code
    assert " if " not in code


def test_regions_of_one_known_dtype_need_no_state_while_running() -> None:
    assert "region_target" not in amp_script.script(one_object_reused).code


def float32_region(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.float32):
        return torch.mm(x, x)


def test_an_unsupported_dtype_warns_and_disables_the_region() -> None:
    with pytest.warns(UserWarning, match="CPU Autocast only supports dtypes? of"):
        scripted = amp_script.script(float32_region)
    with pytest.warns(UserWarning, match="CPU Autocast only supports dtypes? of"):
        want = float32_region(X)
    assert_same(scripted(X), want)


def test_an_unsupported_dtype_warns_while_running_if_it_comes_then() -> None:
    scripted = amp_script.script(dtype_at_run_time)
    with pytest.warns(UserWarning, match="CPU Autocast only supports dtypes? of"):
        got = scripted(X, torch.float32)
    with pytest.warns(UserWarning, match="CPU Autocast only supports dtypes? of"):
        want = dtype_at_run_time(X, torch.float32)
    assert_same(got, want)


class _RegionInAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.region = torch.autocast("cpu", dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor):
        with self.region:
            return torch.mm(x, x)


def test_a_region_can_be_an_attribute_of_a_module() -> None:
    module = _RegionInAttribute()
    assert_agrees(amp_script.script(module), module, X)


def changed_region(x: torch.Tensor):
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    region._enabled = False
    with region:
        return torch.mm(x, x)


def test_a_region_changed_after_it_was_made_is_refused_with_its_line() -> None:
    with pytest.raises(LoweringError) as caught:
        amp_script.script(changed_region)
    assert 'region = torch.autocast("cpu"' in caught.value.source
    assert caught.value.advice


def unknown_device(x: torch.Tensor):
    with torch.autocast("meta", dtype=torch.bfloat16):
        return torch.mm(x, x)


def test_a_device_without_autocast_is_refused_with_its_line() -> None:
    with pytest.raises(LoweringError, match="'meta' has no autocast") as caught:
        amp_script.script(unknown_device)
    assert 'torch.autocast("meta"' in caught.value.source


def test_an_exception_inside_a_region_leaves_no_state() -> None:
    def raising(x: torch.Tensor, n: int):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if n > 3:
                raise RuntimeError("too large")
            return torch.mm(x, x)

    scripted = amp_script.script(raising)
    before = AmbientState.current()
    with pytest.raises(torch.jit.Error, match="too large"):
        scripted(X, 4)
    assert AmbientState.current() == before
    assert_agrees(scripted, raising, X, 1)
