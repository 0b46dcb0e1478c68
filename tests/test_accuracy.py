"""compare_layers: culprits are told from victims, and what it advises helps as much as it says."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import amp_script
from amp_script.accuracy import Advice, Difference, LayerCall, LayerReport, compare_layers
from amp_script.accuracy.difference import difference
from amp_script.errors import ComparisonError, StructureError, SubmoduleError, TracingError

HALVES = (torch.bfloat16, torch.float16)
X = torch.rand(3, 8, generator=torch.Generator().manual_seed(0))


class Norm(nn.Module):
    """Overflows in float16 from values of 256 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()


class Large(nn.Module):
    """Overflows in float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1e6


class Attention(nn.Module):
    """Scores that overflow in float16 become NaN in their softmax."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.query, self.key, self.softmax = nn.Linear(8, 8), nn.Linear(8, 8), nn.Softmax(-1)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.query(x) * self.scale) @ (self.key(x) * self.scale).T
        return self.softmax(scores / self.scale) @ x.to(scores.dtype)


class Block(nn.Module):
    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 8), inner, nn.Linear(8, 8)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner(self.up(x) * self.scale))


def net(*bad: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(Norm(), 1000.0 if index in bad else 1.0) for index in range(4)]
    return nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 2)).eval()


def by_label(report: LayerReport) -> dict[str, LayerCall]:
    return {call.label: call for call in report.calls}


def run(model: Any, *args: Any, dtype: torch.dtype) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return model(*args)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


# --- the measures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_measured_is_what_the_two_runs_give(dtype: torch.dtype) -> None:
    model = net()
    report = compare_layers(model, X, dtype=dtype, advise=False)
    with torch.no_grad():
        full = model(X)
        first, first_full = run(model[0], X, dtype=dtype), model[0](X)
    found = by_label(report)
    assert report.output.relative == pytest.approx(distance(run(model, X, dtype=dtype), full))
    assert found["(the model)"].accumulated == found["(the model)"].own == report.output
    assert found["0"].own == found["0"].accumulated
    assert found["0"].own is not None
    assert found["0"].own.relative == pytest.approx(distance(first, first_full))
    assert found["0"].own.largest == float((first.float() - first_full).abs().max())
    assert found["0"].dtypes == (dtype,)
    # On inputs as float32 has them, rounded as they come under autocast.
    inputs: list[torch.Tensor] = []
    hook = model[2].down.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(X)
        hook.remove()
        rounded = inputs[0].to(dtype)
        want = distance(run(model[2].down, rounded, dtype=dtype), model[2].down(rounded.float()))
    own = found["2.down"].own
    assert own is not None
    assert own.relative == pytest.approx(want)
    assert report.advice is None
    assert report.lost_in_float32 == 0


def test_calls_are_named_and_nested_as_they_happen() -> None:
    report = compare_layers(net(), X, advise=False)
    names = [call.name for call in report.calls]
    assert names[:6] == ["", "0", "1", "1.up", "1.inner", "1.down"]
    callers = {
        call.name: None if call.caller is None else report.calls[call.caller].name
        for call in report.calls
    }
    assert callers[""] is None
    assert callers["3"] == ""
    assert callers["3.inner"] == "3"
    assert {call.kind for call in report.calls} == {"Sequential", "Linear", "Block", "Norm"}


def test_culprits_are_told_from_victims() -> None:
    report = compare_layers(net(2), X, dtype=torch.float16)
    ranked = report.worst_first()
    found = by_label(report)
    assert ranked[0].name == "3.inner"
    victim = found["4.inner"]
    assert victim.accumulated is not None
    assert victim.own is not None
    assert victim.accumulated.relative > 0.05
    assert victim.own.relative < 0.005
    around = found["3"].inside
    assert around is not None
    assert report.calls[around].name == "3.inner"
    assert found["3.inner"].inside is None


def test_overflow_counts_where_it_happens() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Attention(300.0), nn.Linear(8, 8)).eval()
    x = 10 * X
    report = compare_layers(model, x, dtype=torch.float16)
    found = by_label(report)
    losing = {name for name, call in found.items() if call.own is not None and call.own.nonfinite}
    assert report.output.nonfinite
    assert losing == {"(the model)", "1"}  # not its softmax, which is given infinities
    softmax, after = found["1.softmax"], found["2"]
    assert softmax.accumulated is not None
    assert softmax.accumulated.nans
    assert after.accumulated is not None
    assert after.accumulated.nans == after.accumulated.nonfinite > 0
    assert report.advice is not None
    assert report.advice.blocks == ("1",)
    assert not report.advice.remaining.nonfinite
    json.loads(report.to_json())


@pytest.mark.parametrize(
    ("found", "wanted", "expected"),
    [
        ([1.0, 3.0], [1.0, 2.0], Difference(1 / 5**0.5, 1.0)),
        ([0.5], [0.0], Difference(0.5, 0.5)),
        ([], [], Difference()),
        ([float("inf"), 2.0], [1.0, 2.0], Difference(0, 0, infinities=1)),
        ([float("nan"), -float("inf")], [1.0, 2.0], Difference(0, 0, 1, 1)),
        ([float("nan"), float("inf")], [float("nan"), float("inf")], Difference()),
        ([float("nan"), 1.0], [float("inf"), 1.0], Difference(0, 0, nans=1)),
        ([3e38], [-3e38], Difference(2, float(torch.tensor(3e38)) * 2)),
        ([1, 2, 3, 4], [1, 2, 3, 7], Difference(0.25, 3)),
        ([True, False], [True, True], Difference(0.5, 1)),
        ([1 + 1j], [1 + 0j], Difference(1, 1)),
    ],
)
def test_differences(found: list[Any], wanted: list[Any], expected: Difference) -> None:
    tensors = torch.tensor(found), torch.tensor(wanted)
    copies = copy.deepcopy(tensors)
    got = difference({"x": tensors[0]}, {"x": tensors[1]})
    assert got is not None
    assert got.relative == pytest.approx(expected.relative)
    assert got.largest == pytest.approx(expected.largest)
    assert (got.infinities, got.nans) == (expected.infinities, expected.nans)
    for tensor, copied in zip(tensors, copies, strict=True):
        assert tensor.equal(copied) or tensor.isnan().any()
    json.dumps([got.relative, got.largest], allow_nan=False)


def test_of_several_tensors_the_worst_counts_and_others_are_left_out() -> None:
    one, two = torch.ones(2), torch.tensor([1.0, float("inf")])
    got = difference(
        {"a": one, "b": two, "c": one, "d": torch.ones(3), "e": torch.ones(2, dtype=torch.half)},
        {"a": 2 * one, "b": one, "d": one, "e": one, "f": one},
    )
    assert got == Difference(0.5, 1.0, infinities=1)
    assert difference({"a": one}, {"b": one}) is None
    assert Difference(0.5) < Difference(0.6) < Difference(0.1, nans=1) < Difference(0, infinities=2)


@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e200])
def test_no_square_overflows_or_vanishes(scale: float) -> None:
    wanted = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found = wanted + torch.tensor([0.0, 1.0])
    got = difference({"x": scale * found}, {"x": scale * wanted})
    assert got is not None
    assert got.relative == pytest.approx(distance(found, wanted))
    assert got.largest == pytest.approx(scale)
    assert difference({"x": scale * wanted}, {"x": scale * wanted}) == Difference()


def test_integers_are_compared_with_floating_point_numbers_as_numbers() -> None:
    nan = torch.tensor([float("nan"), 2.0])
    assert difference({"x": torch.tensor([1, 2])}, {"x": nan}) == Difference()
    got = difference({"x": torch.tensor([True, False])}, {"x": torch.tensor([1.0, 0.5])})
    assert got == Difference(0.5 / 1.25**0.5, 0.5)


class Kind(nn.Module):
    def __init__(self, change: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.layer(x).float())


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (torch.Tensor.to_sparse, torch.Tensor.to_dense),
        (torch.Tensor.to_sparse_csr, torch.Tensor.to_dense),
        (lambda x: x.to(torch.float8_e4m3fn), torch.Tensor.float),
        (
            lambda x: torch.quantize_per_tensor(x, 1e-3, 0, torch.qint32),
            torch.Tensor.dequantize,
        ),
        (lambda x: torch.nested.nested_tensor([x, x[:1]]), lambda x: torch.cat(x.unbind())),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_results_of_every_kind_are_compared(change: Any, back: Any) -> None:
    model = Kind(change).eval()
    report = compare_layers(model, X, dtype=torch.bfloat16)
    with torch.no_grad():
        lower, full = back(run(model, X, dtype=torch.bfloat16)), back(model(X))
    assert report.output.relative == pytest.approx(distance(lower, full))
    assert report.lost_in_float32 == 0
    json.loads(report.to_json())


# --- the advice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [(2,), (0, 3)])
def test_what_is_advised_helps_as_much_as_it_says(bad: tuple[int, ...]) -> None:
    model = net(*bad)
    if len(bad) > 1:
        for index in bad:  # NaN and not zero: each hides the other from the result
            model[index + 1].inner.register_forward_hook(lambda _, __, out: out / (out != 0))
    report = compare_layers(model, X, dtype=torch.float16)
    advice = report.advice
    assert advice is not None
    assert advice.worth_it
    assert {f"{index + 1}.inner" for index in bad} <= set(advice.blocks) or len(bad) > 1
    with torch.no_grad():
        full = model(X)
    with amp_script.keep_float32(model, *advice.blocks):
        kept = run(model, X, dtype=torch.float16)
    assert kept.isfinite().all()
    assert advice.remaining.relative == pytest.approx(distance(kept, full))
    assert advice.remaining < advice.before == report.output
    again = compare_layers(model, X, dtype=torch.float16, keep_float32=advice.blocks, advise=False)
    assert again.output == advice.remaining
    frozen = amp_script.trace_and_freeze(
        model, X, dtype=torch.float16, compute="native", keep_float32=advice.blocks
    )
    assert torch.equal(frozen(X), kept)


def test_a_block_after_the_culprit_may_have_to_be_kept_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Large(), nn.Linear(8, 8), nn.LayerNorm(8)).eval()
    advice = compare_layers(model, X, dtype=torch.float16).advice
    assert advice is not None
    assert {"1", "2"} <= set(advice.blocks)
    assert not advice.remaining.nonfinite


@pytest.mark.parametrize("error", [RuntimeError, ValueError, AssertionError])
def test_where_the_model_takes_no_float32_from_the_culprit_its_caller_is_kept(
    error: type[Exception],
) -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.large, self.norm = nn.Linear(8, 8), Large(), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            z = self.large(y)
            if y.dtype != z.dtype:
                raise error("expected one dtype")
            return self.norm(z)

    model = nn.Sequential(nn.Linear(8, 8), Strict(), nn.Linear(8, 2)).eval()
    advice = compare_layers(model, X, dtype=torch.float16).advice
    assert advice is not None
    assert advice.blocks == ("1",)
    assert not advice.remaining.nonfinite


def test_only_what_is_needed_is_advised() -> None:
    class Unread(nn.Module):
        """Its infinities are not part of the result."""

        def __init__(self) -> None:
            super().__init__()
            self.large = Large()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(self.large(x).abs() > 0, x, x)

    model = nn.Sequential(Unread(), nn.Linear(8, 8), Large(), nn.LayerNorm(8)).eval()
    report = compare_layers(model, X.half(), dtype=torch.float16)
    found = by_label(report)["0.large"].own
    assert found is not None
    assert found.infinities
    assert report.advice is not None
    assert report.advice.blocks == ("2",)


def test_where_all_layers_are_alike_none_is_named() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(8, 8), nn.Tanh())]
    advice = compare_layers(nn.Sequential(*layers).eval(), X).advice
    assert advice is not None
    assert not advice.worth_it
    assert str(advice).startswith("no part of the model stands out: of the blocks that were tried")
    assert advice.remaining < advice.before


def test_a_block_that_the_model_does_not_take_float32_from_is_not_advised() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.other = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, z = self.layer(x), self.other(x)
            if y.dtype != z.dtype:
                raise RuntimeError("expected one dtype")
            return y + z

    advice = compare_layers(nn.Sequential(Strict()).eval(), X).advice
    assert advice is not None
    assert not {"0.layer", "0.other"} & set(advice.blocks)


def test_nothing_to_advise() -> None:
    report = compare_layers(nn.Linear(8, 2).double().eval(), X.double())
    assert report.advice is not None
    assert not report.advice.worth_it
    assert str(report.advice) == "nothing to keep in float32: the result is float32's"
    nan = compare_layers(nn.Linear(8, 2).eval(), X * float("nan"))
    assert nan.lost_in_float32 == 6
    assert "not counted: 6 elements of the result that are infinite or NaN in float32 too" in str(
        nan
    )


# --- whatever a model is made of ------------------------------------------------------------------


class Strange(nn.Module):
    """Shared and unused submodules, state, nested results, a result without tensors, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = self.twin = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.read = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.says, self.counts, self.nests = Says(), Counts(), Nests()
        self.only = nn.ModuleDict({"reduced": nn.Identity(), "full": nn.Identity()})

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], options: Any) -> dict[str, Any]:
        y = self.relu(self.twin(self.layer(x)))
        assert self.says(y) == 8
        cache.append(self.counts(y))
        y = nn.functional.linear(y, self.read.weight)
        y = self.only["full" if y.dtype == torch.float32 else "reduced"](y)
        return {"nested": self.nests((y, cache), options=options), "y": y}


class Says(nn.Module):
    def forward(self, x: torch.Tensor) -> int:
        return x.shape[-1]


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.kept.append(x)
        return x + self.count + torch.rand(x.shape[0], 1) + len(self.kept)


class Nests(nn.Module):
    def forward(self, pair: Any, *, options: Any) -> Any:
        pair[1].append(pair[0])
        return [pair[0] * 2, (pair[1], {1: options["object"], "none": None})]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    state = copy.deepcopy(model.state_dict())
    attributes = [dict(vars(module)) for module in model.modules()]
    generator = torch.get_rng_state()
    yield
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_strange_model(mode: Any) -> None:
    model = Strange().eval()
    cache = [torch.ones(3, 8)]
    with unchanged(model), mode():
        report = compare_layers(model, (X, cache, {"object": torch.ones(2)}))
    assert len(cache) == 1
    assert not model.counts.kept
    found = by_label(report)
    assert found["layer (call 1 of 2)"].own == found["layer (call 1 of 2)"].accumulated
    assert found["layer (call 2 of 2)"].calls == 2
    assert found["says"].note == "returns no tensor"
    assert found["only.full"].note == "not called under autocast"
    assert found["only.reduced"].note == "not called in float32"
    assert found["only.reduced"].own is found["only.reduced"].accumulated is None
    assert set(report.not_called) == {"unused", "read"}
    relu, counts = found["relu"].own, found["counts"].own
    assert relu is not None
    assert relu == Difference()  # in place, on a copy
    assert counts is not None
    assert counts.relative < 0.01  # the same random numbers, the same count
    assert all(call.own is not None for call in report.calls if not call.note)
    json.loads(report.to_json())
    shown = str(report)
    assert "not called, so not measured by themselves: unused, read" in shown
    assert "not called under autocast: only.full" in shown


def test_modules_that_cannot_be_run_out_of_their_turn() -> None:
    class Once(nn.Module):
        def forward(self, numbers: Iterator[torch.Tensor]) -> torch.Tensor:
            return next(numbers) * 2

    class Gives(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.once = nn.Linear(8, 8), Once()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.once(tensor for tensor in [self.layer(x)])

    report = compare_layers(Gives().eval(), X)
    once = by_label(report)["once"]
    assert once.own is None
    assert once.accumulated is not None
    assert once.note.startswith("cannot be run on its own: TypeError: cannot pickle 'generator'")
    assert report.worst_first()[-1] is once


@pytest.mark.parametrize("compiled", [torch.jit.script, amp_script.script])
def test_a_script_module_is_one_block(compiled: Any) -> None:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).eval()
    model = nn.Sequential(nn.Linear(8, 8), compiled(inner)).eval()
    report = compare_layers(model, X)
    plain = by_label(compare_layers(nn.Sequential(model[0], inner).eval(), X))
    found = by_label(report)
    assert found.keys() == {"(the model)", "0", "1"}
    assert found["1"].own == plain["1"].own
    assert found["1"].accumulated == plain["1"].accumulated
    assert not report.not_called


def test_functions_and_methods_run_modules() -> None:
    model = net()
    report = compare_layers(lambda x: model(x).softmax(-1), X)
    assert by_label(report)["(the model)"].caller is None
    with torch.no_grad():
        full = model(X).softmax(-1)
        want = distance(run(lambda x: model(x).softmax(-1), X, dtype=torch.bfloat16), full)
    assert report.output.relative == pytest.approx(want)


def test_regions_inside_the_model_are_the_state_that_a_layer_is_measured_in() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.exact, self.lower = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                y = self.exact(x.float())
            with torch.autocast(
                "cpu", dtype=torch.float16, enabled=torch.is_autocast_enabled("cpu")
            ):
                return self.lower(y)

    found = by_label(compare_layers(nn.Sequential(Inside()).eval(), X))
    assert found["0.exact"].own == Difference()
    assert found["0.exact"].dtypes == (torch.float32,)
    lower = found["0.lower"].own
    assert lower is not None
    assert 0 < lower.relative < 1e-3  # float16's, not bfloat16's


def test_an_lstm_that_the_processor_has_no_kernel_for() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.lstm(x)[0])

    found = by_label(compare_layers(Tagger().eval(), X.view(1, 6, 4), dtype=torch.float16))
    own = found["lstm"].own
    assert own is not None
    assert 0 < own.relative < 0.01


def test_progress_ends_where_it_says() -> None:
    said: list[tuple[str, int, int]] = []
    report = compare_layers(net(), X, progress=lambda *step: said.append(step))
    comparing = [step[1:] for step in said if "comparing" in step[0]]
    total = len(report.calls)
    assert comparing[-1] == (total, total)
    assert [done for done, _ in comparing] == sorted(done for done, _ in comparing)
    assert report.advice is not None
    assert said[-1][1:] == (report.advice.tried, 0)


# --- what is refused ------------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self, *dtypes: torch.dtype, error: type[Exception] = RuntimeError) -> None:
        super().__init__()
        self.dtypes, self.error = dtypes, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype in self.dtypes:
            raise self.error(f"no kernel for {x.dtype}\nand more")
        return x


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (nn.Linear(8, 8), TracingError, "training mode"),
        (3, ComparisonError, "the model is a int: expected a module or a function"),
        (lambda x: x * 2, ComparisonError, "runs no module that can be seen from outside"),
        (
            nn.Sequential(nn.Linear(8, 8), nn.Sequential(Fails(torch.bfloat16))).eval(),
            ComparisonError,
            r"under autocast, in '1\.0' \(Fails\): RuntimeError: no kernel for torch.bfloat16$",
        ),
        (
            nn.Sequential(nn.Linear(8, 8), Fails(torch.float32)).eval(),
            ComparisonError,
            r"fails in float32, in '1' \(Fails\): RuntimeError: no kernel for torch.float32$",
        ),
        (
            nn.Sequential(nn.Linear(8, 8), Fails(torch.float32, error=AssertionError)).eval(),
            ComparisonError,
            r"fails in float32, in '1' \(Fails\): AssertionError: no kernel for torch.float32$",
        ),
        (
            nn.Sequential(nn.Linear(8, 8), torch.jit.script(nn.Linear(9, 8))).eval(),
            ComparisonError,
            r"fails under autocast, in '1' \(RecursiveScriptModule\): .*mat1 and mat2",
        ),
        (nn.Sequential(Says()).eval(), ComparisonError, "there is nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(model: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        compare_layers(model, X)


class Around(nn.Module):
    """Passes on a dictionary that contains itself."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"x": x * 2}
        found["self"] = found
        return found


class Inside(nn.Module):
    def __init__(self, depth: int = 1) -> None:
        super().__init__()
        self.around, self.layer, self.depth = Around(), nn.Linear(8, 8), depth

    def forward(self, x: torch.Tensor) -> Any:
        y: Any = self.layer(self.around(x)["x"])
        for _ in range(self.depth):
            y = [y]
        return y


def test_containers_that_contain_themselves_or_are_nested_too_deep() -> None:
    report = compare_layers(Inside().eval(), X)
    assert [call.name for call in report.calls] == ["", "around", "layer"]
    with pytest.raises(StructureError, match="nested more than 100 levels deep"):
        compare_layers(Inside(1200).eval(), X)


def test_patterns_are_refused_as_in_freezing() -> None:
    with pytest.raises(SubmoduleError, match="'9': it matches no submodule"):
        compare_layers(net(), X, keep_float32=["9"])
    model = Strange().eval()
    inputs = (X, [], {"object": 1})
    with pytest.raises(SubmoduleError, match="'unused': the model calls nothing"):
        compare_layers(model, inputs, keep_float32=["unused"])


def test_advice_reads_well() -> None:
    before, after = Difference(0.5, 1, 3, 1200), Difference(0.001)
    assert str(before) == "3 infinite, 1,200 NaN, 50%"
    assert str(Difference(12.3)) == "1,230%"
    assert (
        str(Advice(("a.b", "c"), before, after, 0.1, 3))
        == "wrap 'a.b', 'c' in autocast(enabled=False): 3 infinite, 1,200 NaN, 50% from float32 "
        "before, 0.1% then"
    )
    assert "the whole model" in str(Advice(("",), before, after, 1.0, 3))
    assert not Advice(("a",), before, after, 0.9, 3).worth_it
    assert not Advice(("a",), Difference(0.5), Difference(0.4), 0.1, 3).worth_it
    assert str(Advice((), after, after, 0, 2)) == (
        "none of the blocks that were tried does better in float32; runs: 2"
    )
