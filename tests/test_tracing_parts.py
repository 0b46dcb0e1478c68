"""The parts of tracing that have rules of their own: each against what it is there for."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from versions import needs_register_autocast

import amp_script
from amp_script.errors import TracingError
from amp_script.interception import replaced
from amp_script.lowering._graph import Editor, Graph, places_of
from amp_script.tracing.constants import share_constants
from amp_script.tracing.graph_difference import first_difference
from amp_script.tracing.specialise import specialise
from amp_script.untouched import seeded, untouched


def eager(model: Any, *args: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*args)


def graph_of(source: str) -> Graph:
    unit = torch._C.CompilationUnit()
    unit.define(textwrap.dedent(source) + "\n", {"torch": torch}.get)
    (function,) = unit.get_functions()
    return function.graph


# --- constants --------------------------------------------------------------------------------


def test_constants_of_the_same_bytes_share_memory() -> None:
    weight, written = torch.rand(3, 4), torch.zeros(12)
    nan = torch.full((12,), float("nan"))
    alike = [weight, weight.clone(), weight.t().clone(), written, written.clone(), nan, nan.clone()]
    graph = graph_of(
        f"""
        def f({", ".join(f"x{index}: Tensor" for index in range(len(alike)))}):
            x3.add_(1)
            return x0, x1, x2, x3, x4, x5, x6
        """
    )
    editor = Editor(graph)
    for value, tensor in zip(list(graph.inputs()), alike, strict=True):
        value.replaceAllUsesWith(editor.constant_before(editor.first(), tensor))
    for _ in alike:
        graph.eraseInput(0)
    share_constants(graph)
    torch._C._jit_pass_lint(graph)
    run = torch._C._create_function_from_graph("run", graph)
    assert all(torch.equal(a, b) for a, b in zip(run()[:3], alike[:3], strict=True))
    assert run()[4].eq(0).all()
    shared = [tensor.untyped_storage().data_ptr() for tensor in run()]
    assert shared[0] == shared[1] == shared[2]
    assert shared[3] != shared[4]
    assert shared[5] == shared[6]


# --- settling what a program asks of its tensors --------------------------------------------------


def kinds(graph: Graph) -> set[str]:
    return {node.kind() for node in graph.nodes()} - {"prim::Constant"}


def test_questions_about_dtype_and_device_are_answered() -> None:
    graph = graph_of(
        """
        def f(x: Tensor):
            if x.dtype != torch.bfloat16 and x.is_floating_point() and x.is_cpu:
                x = x.to(torch.bfloat16)
            if x.dtype == torch.bfloat16 and not x.is_cuda:
                x = x.to(torch.bfloat16) * 2
            return x
        """
    )
    specialise(graph, {"x": torch.float32}, "cpu")
    assert kinds(graph) == {"aten::to", "aten::mul"}
    assert len(list(graph.findAllNodes("aten::to"))) == 1


def test_casts_in_branches_are_shared_with_those_before() -> None:
    graph = graph_of(
        """
        def f(x: Tensor, choice: bool):
            y = x.to(torch.bfloat16)
            if choice:
                z = x.to(torch.bfloat16)
            else:
                z = y
            return torch.mm(y, z)
        """
    )
    specialise(graph, {"x": torch.float32}, "cpu")
    assert kinds(graph) == {"aten::to", "aten::mm"}


def test_casts_that_differ_or_whose_source_changes_stay() -> None:
    graph = graph_of(
        """
        def f(x: Tensor, z: Tensor):
            y = x.to(torch.bfloat16)
            x.add_(1)
            again = x.to(torch.bfloat16)
            copied = z.to(torch.float32, copy=True)
            return torch.mm(y, again), torch.mm(copied, z.to(torch.float32))
        """
    )
    specialise(graph, {"x": torch.float32, "z": torch.float32}, "cpu")
    assert len(list(graph.findAllNodes("aten::to"))) == 3


def test_a_program_that_names_another_device_keeps_its_questions() -> None:
    graph = graph_of(
        """
        def f(x: Tensor):
            y = x.to(torch.device("meta"))
            if y.is_cpu:
                y = y * 2
            return y
        """
    )
    torch._C._jit_pass_constant_propagation(graph)
    specialise(graph, {"x": torch.float32}, "cpu")
    assert "prim::is_cpu" in kinds(graph)


# --- differences between two recordings -----------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ("return torch.mm(x * 2, x)", None),
        ("return torch.mm(x * 3, x)", ("mul(_, 2)", "mul(_, 3)")),
        ("return torch.mm(x, x * 2)", ("mm(_, _)", "mm(_, _)")),
        ("return torch.mm(x + 2, x)", ("mul(_, 2)", "add(_, 2, 1)")),
        ("y = torch.mm(x * 2, x)\n    return y.view([4])", ("the end", "view(_, [4])")),
        ("return x", ("mul(_, 2)", "the end")),
    ],
)
def test_first_difference(other: str, found: tuple[str, str] | None) -> None:
    one = graph_of("def f(x: Tensor):\n    return torch.mm(x * 2, x)")
    difference = first_difference(one, graph_of(f"def f(x: Tensor):\n    {other}"))
    assert (difference and (difference.one, difference.other)) == found


def test_lines_are_the_users_wherever_the_program_was_made() -> None:
    stack = (
        "/there/site-packages/amp_script/interception.py(57): chosen\n"
        "/home/amp_script/model.py(3): forward\n"
    )
    node: Any = SimpleNamespace(sourceRange=lambda: stack)
    assert list(places_of(node)) == [("/home/amp_script/model.py", 3)]


# --- standing in ----------------------------------------------------------------------------------


class Base:
    def value(self) -> str:
        return "original"


class Derived(Base):
    pass


@pytest.mark.parametrize("owner", [Base, Derived])
def test_replaced_for_this_thread_and_put_back(owner: type) -> None:
    own = "value" in vars(owner)
    seen: dict[str, str] = {}

    def look() -> None:
        seen["elsewhere"] = owner().value()

    with replaced(owner, "value", lambda original, self: f"not {original(self)}"):
        assert owner().value() == "not original"
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == {"elsewhere": "original"}
    assert owner().value() == "original"
    assert ("value" in vars(owner)) == own


def test_threads_may_stand_in_at_the_same_time_and_leave_in_any_order() -> None:
    method = Base.value
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    seen: dict[str, str] = {}

    def first() -> None:
        with replaced(Base, "value", lambda original, self: "first"):
            first_in.set()
            assert second_in.wait(10)
            seen["first"] = Base().value()
        first_out.set()

    def second() -> None:
        assert first_in.wait(10)
        with replaced(Base, "value", lambda original, self: f"second, {original(self)}"):
            second_in.set()
            assert first_out.wait(10)
            seen["second"] = Base().value()

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"first": "first", "second": "second, original"}
    assert Base.value is method


def test_untouched_puts_everything_back() -> None:
    model = nn.BatchNorm1d(4)
    model.notes = ["a"]
    with untouched([model]) as state:
        assert not state.changed()
        model(torch.rand(8, 4))
        assert state.changed()
        model.notes.append("b")
        model.other = 1
        model.eval()
        model.register_forward_hook(lambda *args: None)
        del model.weight
    assert model.notes == ["a"]
    assert not hasattr(model, "other")
    assert model.training
    assert not model._forward_hooks
    assert torch.equal(model.running_mean, torch.zeros(4))
    assert model.num_batches_tracked == 0
    assert isinstance(model.weight, nn.Parameter)


def test_a_parameter_changed_in_place_is_an_error() -> None:
    class Drifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.add_(1)
            return x * self.weight

    with pytest.raises(TracingError, match="changes its parameter 'weight' of Drifts in place"):
        amp_script.trace_and_freeze(Drifts().eval(), torch.rand(3, 4))


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
        model[0].weight[0, 0, 0, 0] = math.nan
    x = torch.rand(2, 3, 8, 8)
    frozen = amp_script.trace_and_freeze(
        model, x, dtype=torch.bfloat16, compute="native", fold_batch_norm=False
    )
    torch.testing.assert_close(frozen(x), eager(model, x), rtol=0, atol=0, equal_nan=True)


class RunsInInferenceMode(nn.Module):
    """Changes a buffer, and a parameter where it is told to, both made in inference mode."""

    def __init__(self, *, drifts: bool) -> None:
        super().__init__()
        self.drifts = drifts
        with torch.inference_mode():
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("calls", torch.zeros(()))

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.drifts:
            self.weight += 1
        return x * self.weight


def test_state_made_in_inference_mode_is_as_before() -> None:
    model = RunsInInferenceMode(drifts=False).eval()
    amp_script.trace_and_freeze(model, torch.rand(3, 4))
    assert model.calls == 0
    with pytest.raises(TracingError, match="changes its parameter 'weight' of RunsInInferenceMode"):
        amp_script.trace_and_freeze(RunsInInferenceMode(drifts=True).eval(), torch.rand(3, 4))


def test_seeded_runs_draw_the_same_and_leave_the_generator() -> None:
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with seeded("cpu"):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), before)


# --- operators written in Python ------------------------------------------------------------------


@torch.library.custom_op("amp_script_tests::chunked_product", mutates_args=())
def chunked_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([chunk @ weight for chunk in x.chunk(2)])


@torch.library.custom_op("amp_script_tests::cast_product", mutates_args=())
def cast_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight).float() + x.float().sum()


if hasattr(cast_product, "register_autocast"):
    cast_product.register_autocast("cpu", torch.float16)


@pytest.mark.parametrize(
    "operator", [chunked_product, pytest.param(cast_product, marks=needs_register_autocast)]
)
@pytest.mark.parametrize("through_namespace", [False, True])
def test_python_operators_are_recorded_by_their_bodies(
    operator: Any, through_namespace: bool
) -> None:
    call = getattr(torch.ops.amp_script_tests, operator._name) if through_namespace else operator

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = call(x, weight)
        return result * 2

    inputs = torch.rand(4, 4), torch.rand(4, 4)
    frozen = amp_script.trace_and_freeze(model, inputs, compute="native")
    assert not [kind for kind in kinds(frozen.graph) if kind.startswith("amp_script_tests")]
    want = eager(model, *inputs)
    assert frozen(*inputs).dtype == want.dtype
    assert torch.equal(frozen(*inputs), want)


# --- processors without kernels -------------------------------------------------------------------

WITHOUT_KERNELS = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}

LSTM_PROGRAM = """
import torch
from torch import nn
import amp_script

torch.manual_seed(0)
model, x = nn.LSTM(8, 16, 2, batch_first=True).eval(), torch.rand(2, 5, 8)
with torch.no_grad():
    full = model(x)[0]
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(x)
        print("runs")
    except RuntimeError:
        print("fails")
frozen = amp_script.trace_and_freeze(model, x, check_inputs=[torch.rand(3, 9, 8)])
out = frozen(x)[0]
assert out.dtype == torch.bfloat16
assert (out.float() - full).norm() / full.norm() < 0.02
assert frozen.metadata.verification.eager_distance is None
"""


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="the environment variables that take instructions away are for x86",
)
def test_an_lstm_is_recorded_where_it_does_not_run() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LSTM_PROGRAM],
        env={**os.environ, **WITHOUT_KERNELS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fails\n"


def test_arguments_that_a_scripted_part_does_not_take_are_refused_by_it() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = amp_script.script(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x, x)

    with pytest.raises(RuntimeError, match=r"expected at most 2 argument\(s\)"):
        amp_script.trace_and_freeze(Wrong().eval(), torch.rand(2, 4))
