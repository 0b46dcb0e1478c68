"""``precision_report``: what it says of a program against what the program does when it runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import opdb
import pytest
import report_truth
import torch
from torch import nn

import amp_script
from amp_script import autocast, precision_report, trace_and_freeze
from amp_script.errors import ArgumentError
from amp_script.frozen import FrozenModule
from amp_script.lowering._graph import Editor, nodes_of
from amp_script.metadata import SCHEMA_VERSION as METADATA_VERSION
from amp_script.report import PrecisionReport
from amp_script.report.flat import Flat
from amp_script.report.model import SCHEMA_VERSION
from amp_script.report.reading import Reading

BF = torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.relu(self.inner(x)) + x)


class Network(nn.Module):
    """Two blocks of one class, a head, and an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).softmax(-1)


class WithRegion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = Network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu", dtype=torch.bfloat16):
            y = self.network(x)
        return y * 2


class Pair(nn.Module):
    """Inputs in containers."""

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], more: dict[str, torch.Tensor]):
        return pair[0] @ more["weight"], pair[1] + 1


X = torch.linspace(-1, 1, 24).reshape(3, 8)


@pytest.fixture(scope="module")
def frozen() -> FrozenModule:
    torch.manual_seed(0)
    return trace_and_freeze(Network().eval(), X, dtype=BF, compute="native")


@pytest.fixture(scope="module")
def saved(frozen: FrozenModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "model.pt"
    amp_script.save(frozen, path)
    return path


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("input_dtype", "half"), [(torch.float32, 0), (BF, 1)])
def test_no_operator_has_another_dtype_than_is_said(input_dtype: torch.dtype, half: int) -> None:
    wrong, known = [], 0
    for case in opdb.cases(torch.float32, samples=1, shard=(half, 2)):
        for sample in case.cast(input_dtype).samples:
            program = _traced(sample)
            if program is not None:
                found = report_truth.compare(program._c, sample.inputs())
                wrong += [f"{case.name}: {line}" for line in found.wrong]
                known += found.known
    assert not wrong, "\n".join(wrong)
    assert known > 150


def _traced(sample: opdb.Sample) -> Any:
    """A plain trace of one call, or None where torch makes none."""

    class Call(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> object:
            return sample.call(*tensors)

    if not sample.tensors:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trace of one sample is all that is wanted here
            return torch.jit.trace(Call(), sample.inputs(), check_trace=False, strict=False)
    except (AssertionError, NotImplementedError, RuntimeError):
        return None


def _odd() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(1, 2, 3)
            self.norm = nn.BatchNorm2d(2)
            self.table = nn.Embedding(5, 8)

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.norm(self.convolution(x[None, None].repeat(1, 1, 2, 2)))
            z = x @ self.table(ids).t() * torch.tensor(2.0)
            # A scalar tensor widens nothing, and what has dimensions does.
            wide = z.float().mean() + z
            mask = (ids > 2) & (ids < 4)
            return y.mean(), wide, wide + x[:, :1], mask, torch.topk(x, 2)[1], x.argmax() + 1

    return Odd().eval(), {"x": X, "ids": torch.tensor([1, 2, 3])}


def _residual() -> tuple[nn.Module, Mapping[str, torch.Tensor]]:
    return Network().eval(), {"x": X}


@pytest.mark.parametrize("make", [_odd, _residual])
@pytest.mark.parametrize("dtype", [BF, torch.float16])
def test_every_dtype_of_a_frozen_model_is_known(
    make: Callable[[], tuple[nn.Module, Mapping[str, torch.Tensor]]], dtype: torch.dtype
) -> None:
    model, inputs = make()
    frozen = trace_and_freeze(model, inputs, dtype=dtype, compute="native")
    with frozen.storable() as cpp_module:
        found = report_truth.compare(cpp_module, list(inputs.values()), frozen.metadata.inputs)
    assert not found.wrong
    assert found.known == found.seen > 10


@pytest.mark.parametrize(
    "call",
    [
        lambda scalar, vector, matrix: matrix.bfloat16() * torch.max(matrix, vector).float(),
        lambda scalar, vector, matrix: matrix.bfloat16() * nn.functional.linear(vector, vector),
        lambda scalar, vector, matrix: matrix.bfloat16() * scalar.masked_fill(matrix > 0, 1.0),
        lambda scalar, vector, matrix: matrix.bfloat16() * scalar.clamp(min=matrix),
        lambda scalar, vector, matrix: matrix.bfloat16() * scalar.pow(matrix),
        lambda scalar, vector, matrix: matrix.bfloat16() * scalar.clone().unsqueeze_(0),
        lambda scalar, vector, matrix: matrix.bfloat16() * matrix.select(0, 0).select(0, 0),
        lambda scalar, vector, matrix: torch.add(vector, vector, out=vector.bfloat16()) * 2,
    ],
)
def test_dimensions_that_promotion_depends_on(call: Callable[..., torch.Tensor]) -> None:
    class Called(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return call(*tensors)

    inputs = torch.tensor(2.0), torch.rand(3), torch.rand(3, 3)
    traced = torch.jit.trace(Called(), inputs, check_trace=False)
    assert not report_truth.compare(traced._c, inputs).wrong


def test_inputs_that_a_trace_names_alike_are_told_apart() -> None:
    def negative(input: torch.Tensor) -> torch.Tensor:
        return -input

    class Twice(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(negative(tensor) for tensor in tensors)

    inputs = X, X.bfloat16()
    traced = torch.jit.trace(Twice(), inputs)
    names = [value.debugName() for value in list(traced.graph.inputs())[1:]]
    assert {name.split(".")[0] for name in names} == {"input"}
    assert not report_truth.compare(traced._c, inputs).wrong


def test_a_long_program() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            for _ in range(2000):
                y = torch.relu(y)
            return y + x

    report = precision_report(trace_and_freeze(Chain().eval(), X, dtype=BF, compute="native"))
    assert report.by_kind["aten::relu"] == {BF: 2000}
    assert report.by_kind["aten::add"] == {torch.float32: 1}


@pytest.mark.parametrize("state", ["live", "loaded"])
def test_a_lowered_program_is_described_as_outside_regions(state: str, tmp_path: Path) -> None:
    module = amp_script.script(WithRegion())
    if state == "loaded":
        amp_script.save(module, tmp_path / "scripted.pt")
        module = amp_script.load(tmp_path / "scripted.pt")
    report = precision_report(module)
    assert report.kind == "scripted"
    assert report.by_kind["aten::linear"] == {BF: 3}
    assert report.weights.keys() == {torch.float32}
    casts = [cast for cast in report.casts if cast.feeds == ("aten::linear",)]
    assert {(cast.origin, cast.after, cast.conditional) for cast in casts} == {
        ("weight", BF, True),
        ("input", BF, True),
        ("activation", BF, True),
    }
    assert report.by_submodule["network.head"] == {BF: 3}
    assert report.needs.lite_interpreter


def test_regions_that_are_left_to_the_jit_are_not_guessed() -> None:
    report = precision_report(torch.jit.script(WithRegion()))
    dtypes = {operator.kind: operator.dtype for operator in report.operators}
    assert dtypes["aten::linear"] is None
    assert report.by_submodule["network.head"] == {None: 1}
    with torch.autocast("cpu", dtype=BF):
        plain = precision_report(torch.jit.script(Network()))
    assert plain.by_kind["aten::linear"] == {torch.float32: 3}
    assert plain.by_kind["aten::add"] == {None: 2}


def test_no_argument_of_a_region_makes_it_be_guessed() -> None:
    class Uncached(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.to(torch.float64).to(torch.float32)
            with torch.autocast("cpu", torch.bfloat16, True, False):
                z = torch.mm(y, y)
            return z + 1

    report = precision_report(torch.jit.script(Uncached()))
    assert report.by_kind["aten::mm"] == report.by_kind["aten::add"] == {None: 1}


def test_a_report_leaves_a_live_module_as_it_was() -> None:
    module = torch.jit.script(WithRegion())
    expected = torch.jit.script(WithRegion())
    expected.load_state_dict(module.state_dict())
    before = str(module.graph)
    precision_report(module)
    assert str(module.graph) == before
    for _ in range(3):
        assert torch.equal(module(X), expected(X))


def test_inputs_in_containers_have_the_dtypes_of_their_specs() -> None:
    inputs = ((X, X.double()), {"weight": torch.rand(8, 4)})
    report = precision_report(trace_and_freeze(Pair().eval(), inputs, dtype=BF))
    assert report.by_kind["aten::matmul"] == {BF: 1}
    assert report.by_kind["aten::add"] == {torch.float64: 1}
    assert {cast.origin for cast in report.casts} == {"input"}


def test_calls_forks_branches_and_loops_are_read() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(torch.float16) if x.size(0) > 2 else x.to(torch.float16) * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, n: int) -> list[torch.Tensor]:
            later = torch.jit.fork(self.inner, x)
            y = self.weight.to(torch.bfloat16)
            for _ in range(n):
                y = torch.tanh(y)
            return [torch.jit.wait(later), y]

    report = precision_report(torch.jit.script(Outer()))
    assert report.by_kind["aten::tanh"] == {BF: 1}
    assert report.by_kind["aten::to"] == {torch.float16: 2, BF: 1}
    assert report.by_submodule["inner"] == {torch.float16: 3}
    origins = {(cast.after, cast.origin, cast.feeds) for cast in report.casts}
    assert (torch.float16, "input", ("output",)) in origins
    assert (BF, "weight", ("aten::tanh", "output")) in origins


def test_what_only_gradients_need_is_left_out() -> None:
    model = nn.LSTM(8, 8).eval()
    frozen = trace_and_freeze(model, X, dtype=BF, compute="native")
    with frozen.storable() as cpp_module:
        graph = cpp_module._get_method("forward").graph
        paths = [node for node in nodes_of(graph) if node.kind() == "aten::is_grad_enabled"]
    report = precision_report(frozen)
    assert bool(paths) == bool(report.gradient_operators)


# --- submodules -----------------------------------------------------------------------------------

EXPECTED_SUBMODULES = [
    "blocks.0.inner",
    "blocks.0",
    "blocks.0.norm",
    "blocks.1.inner",
    "blocks.1",
    "blocks.1.norm",
    "head",
    "",
]


def test_submodules_outlive_freezing_and_saving(frozen: FrozenModule, saved: Path) -> None:
    for module in (frozen, amp_script.load(saved, compute="native"), torch.jit.load(saved)):
        assert list(precision_report(module).by_submodule) == EXPECTED_SUBMODULES


def test_submodules_outlive_a_plan_that_is_baked_in(frozen: FrozenModule, tmp_path: Path) -> None:
    amp_script.save(frozen, tmp_path / "baked.pt", compute="upcast")
    report = precision_report(amp_script.load(tmp_path / "baked.pt"))
    assert report.compute == "upcast"
    assert report.by_kind["aten::linear"] == {torch.float32: 3}
    assert list(report.by_submodule) == EXPECTED_SUBMODULES
    assert all(operator.source for operator in report.operators)


def test_submodules_of_other_programs_as_far_as_torch_keeps_them(tmp_path: Path) -> None:
    traced = torch.jit.trace(Network().eval(), X)
    scripted = torch.jit.script(Network().eval())
    plain = torch.jit.freeze(traced)
    for module in (traced, scripted, plain):
        assert list(precision_report(module).by_submodule) == EXPECTED_SUBMODULES
    for module in (traced, scripted):
        module.save(tmp_path / "other.pt")
        loaded = torch.jit.load(tmp_path / "other.pt")
        assert list(precision_report(loaded).by_submodule) == EXPECTED_SUBMODULES
    plain.save(tmp_path / "frozen.pt")
    assert list(precision_report(torch.jit.load(tmp_path / "frozen.pt")).by_submodule) == [None]


def test_a_name_may_be_anything(tmp_path: Path) -> None:
    names = ["<script>alert(1)</script>", "a\nb): x", "größe", " ", "%2e", "s/t"]
    model = nn.Sequential()
    for name in names:
        model.add_module(name, nn.Linear(8, 8))
    amp_script.save(trace_and_freeze(model.eval(), X, dtype=BF), tmp_path / "names.pt")
    report = precision_report(amp_script.load(tmp_path / "names.pt"))
    assert list(report.by_submodule) == names
    assert "\n" not in report.tables()[2].rows[1][0]


def test_a_function_s_operators_are_of_the_module_that_it_runs() -> None:
    network, other = Network().eval(), nn.Linear(2, 2).eval()
    one = trace_and_freeze(lambda x: network(x) + 1, X, dtype=BF)
    assert set(precision_report(one).by_submodule) == {*EXPECTED_SUBMODULES, None}
    two = trace_and_freeze(lambda x: other(network(x)), X, dtype=BF)
    assert set(precision_report(two).by_submodule) == {None}


# --- casts, weights, needs ------------------------------------------------------------------------


def test_casts_say_where_they_come_from(frozen: FrozenModule) -> None:
    report = precision_report(frozen)
    first, *rest = report.casts
    assert (first.before, first.after, first.origin) == (torch.float32, BF, "input")
    assert {cast.origin for cast in rest} == {"activation"}
    assert all(cast.feeds == ("aten::linear",) and not cast.conditional for cast in report.casts)
    operator = report.operators[first.operator]
    assert operator.kind == "aten::to"
    assert f"{Path(__file__).name}:" in operator.source
    assert operator.source.endswith("return self.norm(torch.relu(self.inner(x)) + x)")


def test_a_cast_of_a_constant_is_told_from_others() -> None:
    # Freezing casts the constants of a program; a cast of one is left where nobody froze it.
    def scales(module: torch.Tensor, x: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        return x * one.to(torch.bfloat16)

    graph = torch.jit.script(scales).graph.copy()
    editor = Editor(graph)
    *_, one = graph.inputs()
    one.replaceAllUsesWith(editor.constant_before(editor.first(), torch.ones(2)))
    cast = next(iter(Reading.of(Flat("forward", graph), ()).casts(0)))
    assert (cast.origin, cast.after, cast.feeds) == ("constant", BF, ("aten::mul",))


def test_casts_to_another_tensor_s_dtype() -> None:
    class Like(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, z = x.to(torch.float32), x.to(torch.float16)
            return z.to(y), y.type_as(z)

    report = precision_report(torch.jit.script(Like()))
    one, other = (cast for cast in report.casts if cast.before is not None)
    assert (one.before, one.after) == (torch.float16, torch.float32)
    assert (other.before, other.after) == (torch.float32, torch.float16)


def test_a_cast_that_is_put_into_a_container_feeds_what_takes_it() -> None:
    class Collects(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
            found: list[torch.Tensor] = []
            for _ in range(n):
                found.append(x.to(torch.float16))
            named = {"x": x}
            named["y"] = x.to(torch.float64)
            return torch.stack(found), torch.relu(named["y"])

    report = precision_report(torch.jit.script(Collects()))
    assert {cast.after: cast.feeds for cast in report.casts} == {
        torch.float16: ("aten::stack",),
        torch.float64: ("aten::relu",),
    }
    assert {cast.origin for cast in report.casts} == {"input"}


def test_a_list_that_is_changed_has_no_dtype() -> None:
    class Changed(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
            found = [x.to(torch.bfloat16)]
            for _ in range(n):
                found.append(x.to(torch.float32))
            return torch.cat(found), torch.relu(found[-1])

    report = precision_report(torch.jit.script(Changed()))
    assert report.by_kind["aten::cat"] == report.by_kind["aten::relu"] == {None: 1}


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_in_containers_are_weighed(frozen: bool) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = torch.rand(1), torch.rand(2)
            self.named = {"x": torch.rand(4)}
            self.nested = [[torch.rand(8)], [torch.rand(16)]]

        def forward(self, name: str, index: int):
            return self.pair, self.named[name], self.nested[index]

    module = torch.jit.script(Held().eval())
    weights = precision_report(torch.jit.freeze(module) if frozen else module).weights
    assert (weights[torch.float32].tensors, weights[torch.float32].size) == (5, 4 * 31)


def test_weights_are_those_of_the_file(frozen: FrozenModule, saved: Path) -> None:
    weights = precision_report(frozen).weights
    assert weights == precision_report(torch.jit.load(saved)).weights
    assert weights[BF].size == 2 * (2 * 72 + 18)
    # The two norms have the same ones and zeros, which the program holds once.
    assert weights[torch.float32].size == 4 * 16


def test_shared_memory_counts_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight
            self.register_buffer("part", self.first.weight.detach()[:2])
            self.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
            self.register_buffer("sparse", torch.eye(3, dtype=torch.float64).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    weights = precision_report(torch.jit.script(Shared())).weights
    assert (weights[torch.float32].tensors, weights[torch.float32].size) == (1, 64)
    assert weights[torch.float64].size == 3 * 8
    assert weights[torch.int64].size == 2 * 3 * 8


def test_the_plan_is_that_of_calls(frozen: FrozenModule) -> None:
    assert precision_report(frozen).planned == 0
    upcast = trace_and_freeze(Network().eval(), X, dtype=BF, compute="packed")
    expected = upcast(X)
    report = precision_report(upcast)
    assert (report.compute, report.planned) == ("packed", 3)
    assert report.by_kind["aten::linear"] == {BF: 3}
    assert report.weights == precision_report(frozen).weights
    assert torch.equal(upcast(X), expected)


FOREIGN = torch.library.Library("amp_script_report_test", "DEF")
FOREIGN.define("twice(Tensor x) -> Tensor")


class WithForeignOperator(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.amp_script_report_test.twice(x)


def test_needs_are_the_file_s(saved: Path, tmp_path: Path) -> None:
    loaded = amp_script.load(saved)
    report = precision_report(loaded)
    assert report.metadata == loaded.metadata
    assert report.needs.oldest_libtorch == loaded.metadata.oldest_libtorch is not None
    assert report.needs.lite_interpreter is loaded.metadata.lite_interpreter is True
    with_region = precision_report(torch.jit.script(WithRegion()))
    assert with_region.needs.lite_interpreter is False
    encoder = precision_report(torch.jit.script(nn.TransformerEncoderLayer(8, 2)))
    assert encoder.needs.oldest_libtorch == "2.0"
    assert encoder.needs.unrecorded_operators == ()
    foreign = precision_report(torch.jit.script(WithForeignOperator()))
    assert foreign.needs.oldest_libtorch is None
    assert foreign.needs.unrecorded_operators == ("amp_script_report_test::twice",)


def test_a_module_that_calls_python_has_a_report() -> None:
    class CallsPython(nn.Module):
        # Unannotated, because TorchScript does not resolve annotations of ignored methods here.
        @torch.jit.ignore
        def python(self, x):
            return x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.python(x) + torch.nn.functional.gelu(x)

    report = precision_report(torch.jit.script(CallsPython()))
    assert report.needs.unrecorded_operators == ("prim::PythonOp",)
    assert not report.needs.lite_interpreter
    assert None in report.by_dtype


def test_a_program_in_onednn_s_layout() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval()
    report = precision_report(torch.jit.optimize_for_inference(torch.jit.script(model)))
    assert any("mkldnn" in kind for kind in report.by_kind)
    assert report.weights[torch.float32].size == 4 * (8 * 3 * 9 + 8)


def test_an_empty_module_and_what_is_no_module() -> None:
    report = precision_report(torch.jit.script(nn.Identity()))
    assert report.operators == ()
    assert "none" in str(report)
    anything: Any = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"a Linear: expected a torch\.jit\.ScriptModule"):
        precision_report(anything)


# --- how it is written ----------------------------------------------------------------------------


def test_json_has_what_the_report_has(frozen: FrozenModule) -> None:
    report = precision_report(frozen)
    written = json.loads(report.to_json())
    assert written["schema_version"] == SCHEMA_VERSION == 1
    assert list(written) == [
        "schema_version",
        "name",
        "kind",
        "compute",
        "planned",
        "gradient_operators",
        "metadata",
        "needs",
        "weights",
        "by_dtype",
        "by_kind",
        "by_submodule",
        "casts",
        "operators",
    ]
    assert written["metadata"]["schema_version"] == METADATA_VERSION
    assert len(written["operators"]) == len(report.operators)
    assert written["operators"][0] == {
        "method": "forward",
        "name": report.operators[0].name,
        "kind": "aten::to",
        "dtype": "bfloat16",
        "submodule": "blocks.0.inner",
        "source": report.operators[0].source,
        "inputs": [],
        "operands": ["float32"],
    }
    assert written["casts"][0] == {
        "operator": 0,
        "before": "float32",
        "after": "bfloat16",
        "origin": "input",
        "feeds": ["aten::linear"],
        "conditional": False,
    }
    assert sum(written["by_dtype"].values()) == len(report.operators)
    assert {key: value["bytes"] for key, value in written["weights"].items()} == {
        str(dtype).removeprefix("torch."): held.size for dtype, held in report.weights.items()
    }


def test_a_dtype_that_is_not_known_is_called_so() -> None:
    report = precision_report(torch.jit.script(Network()))
    assert json.loads(report.to_json())["by_dtype"]["unknown"] == report.by_dtype[None]
    assert "unknown" in str(report)


def test_text_needs_no_rich(frozen: FrozenModule) -> None:
    text = str(precision_report(frozen))
    assert "blocks.*.inner  (each of 2)" in text
    assert "compute plan      native" in text
    titles = [table.title for table in precision_report(frozen).tables()]
    assert titles[1:] == [
        "Operators by the dtype of their result",
        "Operators by submodule",
        "Casts left",
        "Weights",
    ]


def test_alike_submodules_are_merged_only_if_their_counts_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.ReLU()).eval()
    report: PrecisionReport = precision_report(trace_and_freeze(model, X, dtype=BF))
    merged = [row[0].strip() for row in report.tables()[2].rows]
    assert merged == ["0", "*  (each of 3)"]
