"""verify: what it measures, what it accepts, and how it says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import amp_script
from amp_script.errors import InputError, TracingError, VerificationError
from amp_script.verification import ulp_difference

# --- units in the last place ----------------------------------------------------------------------

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
@given(steps=st.integers(0, 50), start=st.floats(-100, 100))
def test_ulps_count_steps_between_neighbours(dtype: torch.dtype, steps: int, start: float) -> None:
    a = torch.tensor([start, 1.0], dtype=dtype)
    b, up = a.clone(), torch.tensor(math.inf, dtype=dtype)
    for _ in range(steps):
        b[0] = torch.nextafter(b[0], up)
    assert ulp_difference(a, b) == steps
    assert ulp_difference(b, a) == steps


def test_ulps_of_special_values() -> None:
    nan, inf = math.nan, math.inf

    def ulps(a: float, b: float) -> float:
        return ulp_difference(torch.tensor([a, 0.0]), torch.tensor([b, 0.0]))

    assert ulps(0.0, -0.0) == 0
    assert ulps(nan, nan) == 0
    assert ulps(nan, 1.0) == inf
    assert ulps(inf, inf) == 0
    assert 0 < ulps(inf, torch.finfo(torch.float32).max) < 2
    smallest = torch.finfo(torch.float32).smallest_normal * 2.0**-23
    assert ulps(smallest, -smallest) == 2
    assert ulp_difference(torch.tensor([]), torch.tensor([])) == 0
    assert ulp_difference(torch.tensor([3, 9]), torch.tensor([3, 2])) == 7
    assert ulp_difference(torch.tensor([1 + 1j]), torch.tensor([1 + 1j])) == 0


# --- what is accepted -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.layers(x)
        return {"scores": y, "best": y.argmax(-1)}


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, nn.Module, torch.Tensor]:
    """A program of a model, and the model with other last weights."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.rand(5, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    with torch.no_grad():
        model.layers[2].weight.copy_(change(model.layers[2].weight))
    return frozen, model, x


def test_equal_bits() -> None:
    frozen, model, x = changed(lambda weight: weight)
    report = amp_script.verify(frozen, model, x, exact=True)
    assert report.bit_equal
    assert report.accepted
    assert report.ulps == 0
    assert report.distance == report.eager_distance
    assert [output.path for output in report.outputs] == ["output['scores']", "output['best']"]
    assert str(report).splitlines()[0] == "equal to eager autocast to the bit"


def test_another_model_is_refused_with_a_report() -> None:
    frozen, model, x = changed(lambda weight: -weight)
    with pytest.raises(VerificationError) as raised:
        amp_script.verify(frozen, model, x)
    report = raised.value.report
    scores, best = report.outputs
    assert not report.bit_equal
    assert not scores.accepted
    assert scores.ulps is not None
    assert scores.ulps > 1000
    assert scores.distance is not None
    assert scores.eager_distance is not None
    assert scores.distance > 1 > scores.eager_distance
    assert not best.accepted
    text = str(raised.value)
    assert text.startswith("differs from eager autocast in output['scores'], output['best']")
    assert "bfloat16" in text
    assert "5x4" in text


def test_as_near_to_float32_as_eager_autocast_unless_exact_is_asked_for() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.rand(5, 8)
    other = amp_script.trace_and_freeze(model, x, compute="upcast")
    report = amp_script.verify(other, model, x)
    assert report.accepted
    if not report.bit_equal:  # the two kinds of kernel may agree
        assert "as near to float32 as eager autocast" in str(report)
        with pytest.raises(VerificationError):
            amp_script.verify(other, model, x, exact=True)


class Classifier(nn.Module):
    """Two classes by the first token, as fine-tuned encoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[:, 0]).softmax(-1)


def test_few_numbers_in_other_kernels_may_be_further_by_chance() -> None:
    """Of two numbers, the distance is now smaller than eager autocast's and now larger."""
    further = 0
    for seed in range(12):
        torch.manual_seed(seed)
        model, x = Classifier().eval(), torch.randn(1, 16, 64)
        found = amp_script.trace_and_freeze(model, x, compute="upcast").metadata.verification
        assert found is not None
        assert found.distance is not None
        assert found.eager_distance is not None
        further += found.distance > 1.05 * found.eager_distance
    if further == 0:
        pytest.skip("this processor's kernels in both dtypes sum in the same order")


@pytest.mark.parametrize("compute", ["native", "upcast"])
def test_chance_is_granted_to_other_kernels_alone_and_less_of_it_to_many_numbers(
    compute: Any,
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).eval()
    few, many = torch.randn(1, 64), torch.randn(4096, 64)
    frozen = amp_script.trace_and_freeze(layer, few, compute=compute, check_inputs=[many])
    factors = []
    for x in (few, many):
        (output,) = amp_script.verify(frozen, layer, x).outputs
        assert output.limit is not None
        assert output.eager_distance is not None
        factors.append(output.limit / output.eager_distance)
    expected = {"native": [1.05, 1.05], "upcast": [1.05 + math.expm1(4 / 8), 1.058]}[compute]
    assert factors == pytest.approx(expected, rel=0.002)


def test_a_wrong_program_in_other_kernels_is_refused_whatever_chance_may_do() -> None:
    torch.manual_seed(0)
    model, x = Classifier().eval(), torch.randn(3, 16, 64)
    frozen = amp_script.trace_and_freeze(model, x, compute="upcast")
    with torch.no_grad():
        model.head.weight.neg_()
    with pytest.raises(VerificationError, match="inputs of more rows"):
        amp_script.verify(frozen, model, x)


def test_dtype_and_shape_are_compared() -> None:
    frozen, model, x = changed(lambda weight: weight)
    with pytest.raises(VerificationError, match=r"bfloat16 \(expected float32\)"):
        amp_script.verify(frozen, model, x, output_dtype=torch.float32)

    def longer(x: torch.Tensor) -> dict[str, torch.Tensor]:
        result: dict[str, torch.Tensor] = model(x)
        return {"scores": result["scores"].repeat(2, 1), "best": result["best"]}

    with pytest.raises(VerificationError, match=r"5x4 \(expected 10x4\)"):
        amp_script.verify(frozen, longer, x)


def test_other_ways_to_make_a_program() -> None:
    model, x = Net().eval(), torch.rand(5, 8)
    assert amp_script.verify(amp_script.script(model), model, x, exact=True).bit_equal
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(model, x, check_trace=False, strict=False)
    assert amp_script.verify(traced, model, x, exact=True).bit_equal
    with pytest.raises(VerificationError):
        amp_script.verify(traced, model, x, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_that_torch_only_stores_are_compared(dtype: torch.dtype) -> None:
    x = torch.rand(3, 4).to(dtype)
    frozen = amp_script.trace_and_freeze(lambda x: (x, (x.float() @ x.float().t()).to(dtype)), x)
    assert amp_script.verify(frozen, lambda x: (x, (x.float() @ x.float().t()).to(dtype)), x)
    with pytest.raises(VerificationError):
        amp_script.verify(frozen, lambda x: (x, (x.float() @ x.float().t() + 1).to(dtype)), x)


def test_inputs_must_fit_the_reference() -> None:
    frozen, model, x = changed(lambda weight: weight)
    message = r"the inputs do not fit the model: too many .*; expected \(.*\), given 2 by position"
    with pytest.raises(TracingError, match=message):
        amp_script.verify(frozen, model, (x, x))


# --- where one of the two references does not run -------------------------------------------------


class NeedsKernels(nn.Module):
    """Stands for a model whose kernels the processor lacks under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails and torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive\nRun with ONEDNN_VERBOSE=all")
        return self.layer(x)


def test_where_eager_autocast_fails_float32_decides_and_the_report_says_so() -> None:
    model, x = NeedsKernels().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    model.fails = True
    report = amp_script.verify(frozen, model, x)
    assert report.accepted
    assert not report.bit_equal
    assert report.eager_distance is None
    assert report.note == "eager autocast itself fails: could not create a primitive"
    assert str(report).splitlines()[:2] == ["near to float32", report.note]
    with torch.no_grad():
        model.layer.weight.mul_(1.1)
    with pytest.raises(VerificationError, match="eager autocast itself fails"):
        amp_script.verify(frozen, model, x)


def test_a_model_of_lower_precision_has_no_float32() -> None:
    model, x = Net().bfloat16().eval(), torch.rand(5, 8).bfloat16()
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    report = amp_script.verify(frozen, model, x)
    assert report.bit_equal
    assert report.note.startswith("the model does not run in float32")
    assert report.distance is None


def test_without_float32_the_error_says_that_equal_bits_alone_pass() -> None:
    model, x = Net().bfloat16().eval(), torch.rand(5, 8).bfloat16()
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    with torch.no_grad():
        model.layers[2].bias.add_(1)
    with pytest.raises(VerificationError, match=r'no distance to measure.*compute="native"'):
        amp_script.verify(frozen, model, x)
    with pytest.raises(VerificationError) as caught:
        amp_script.verify(frozen, model, x, exact=True)
    assert not caught.value.explanation


class RunsInOneModeOnly(nn.Module):
    """Stands for a model whose own checks, or torch's, refuse the dtypes of one of the modes."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.modes = {autocast}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") not in self.modes:
            raise ValueError("input dtype does not match weight dtype")
        return self.layer(x)


def test_any_exception_tells_that_one_of_the_two_references_does_not_run() -> None:
    model, x = RunsInOneModeOnly(autocast=True).eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    report = amp_script.verify(frozen, model, x)
    assert report.bit_equal
    assert report.note == (
        "the model does not run in float32: input dtype does not match weight dtype"
    )
    model.modes = {False}
    report = amp_script.verify(frozen, model, x)
    assert report.accepted
    assert report.note == "eager autocast itself fails: input dtype does not match weight dtype"
    model.modes = set()
    with pytest.raises(ValueError, match="does not match"):
        amp_script.verify(frozen, model, x)


def test_an_error_of_the_librarys_own_is_no_failure_of_eager_autocast() -> None:
    frozen = amp_script.trace_and_freeze(nn.Linear(8, 8).eval(), torch.rand(3, 8))

    def model(x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise InputError("does not fit the part")
        return x

    with pytest.raises(InputError, match="does not fit the part"):
        amp_script.verify(frozen, model, torch.rand(3, 8))


def test_a_recurrent_layer_that_takes_lower_precision_under_autocast_alone() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(x.to(torch.bfloat16))[0]
            return result

    model, x = Recurrent().eval(), torch.rand(3, 2, 4)
    frozen = amp_script.trace_and_freeze(model, x, dtype=torch.bfloat16, compute="native")
    assert frozen.metadata.verification is not None
    assert frozen.metadata.verification.bit_equal


class InRegionOfItsOwn(nn.Module):
    def __init__(self, region: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.region("cpu", dtype=torch.bfloat16):
            result: torch.Tensor = self.layers(x)
            return result


@pytest.mark.parametrize("region", [torch.autocast, amp_script.autocast])
def test_float32_is_without_the_regions_of_the_model_itself(region: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = InRegionOfItsOwn(region).eval(), torch.rand(5, 8)
    frozen = amp_script.trace_and_freeze(model, x, dtype=torch.bfloat16, compute="native")
    report = amp_script.verify(frozen, model, x)
    with torch.no_grad():
        full, reduced = model.layers(x).double(), model(x).double()
    assert reduced.ne(full).any()
    assert report.eager_distance == float((reduced - full).norm()) / float(full.norm())
    assert not torch.is_autocast_enabled("cpu")
    assert report.bit_equal


def test_a_model_that_always_fails_raises_its_own_error() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    frozen = amp_script.trace_and_freeze(nn.Linear(2, 2).eval(), torch.rand(1, 2))
    with pytest.raises(RuntimeError, match="broken"):
        amp_script.verify(frozen, model, torch.rand(1, 2))


def test_state_and_random_numbers_are_the_same_for_both() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x @ x.t() + self.calls + torch.rand(3, 3)

    model, x = Counter().eval(), torch.rand(3, 4)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    before = torch.get_rng_state()
    for _ in range(2):  # neither the model's state nor the program's is left changed
        assert amp_script.verify(frozen, model, x, exact=True).bit_equal
    assert model.calls.item() == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_buffer_that_is_returned_and_changed_is_compared_as_it_was_returned() -> None:
    class ReturnsItsCount(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.calls.add_(1)
            return self.layer(x), self.calls

    model, x = ReturnsItsCount().eval(), torch.rand(3, 4)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    report = amp_script.verify(frozen, model, x, exact=True)
    assert report.bit_equal
    assert report.outputs[1].distance == 0  # to the run in float32 of the same number
    assert model.calls.eq(0).all()


class Remembers(nn.Module):
    """Keeps what it saw, in the way that ``keep`` says."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(3, 4))
        self.calls = 0
        self.seen: list[int] = []
        self.by_name: dict[str, torch.Tensor] = {}
        self.keep = keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) + self.last + self.calls + len(self.seen) + sum(self.by_name.values())
        self.keep(self, y.detach())
        return y


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("calls", lambda model, y: setattr(model, "calls", model.calls + 1)),
        ("last", lambda model, y: setattr(model, "last", y)),
        ("seen", lambda model, y: model.seen.append(1)),
        ("by_name", lambda model, y: model.by_name.update(y=y)),
        ("new", lambda model, y: (setattr(model, "new", 1), model.seen.append(1))),
    ],
)
def test_state_that_a_trace_cannot_keep_is_named(name: str, keep: Callable[..., object]) -> None:
    model, x = Remembers(keep).eval(), torch.rand(3, 4)
    complaint = rf"the model changes its own [^:]*\bRemembers\.{name}\b.* when it runs"
    with pytest.raises(VerificationError, match=complaint) as caught:
        amp_script.trace_and_freeze(model, x, compute="native")
    assert caught.value.explanation in str(caught.value)
    assert model.calls == 0
    assert not hasattr(model, "new")


def test_state_that_changes_no_result_is_no_hindrance() -> None:
    model = Remembers(lambda model, y: setattr(model, "unread", y)).eval()
    assert amp_script.trace_and_freeze(model, torch.rand(3, 4), compute="native").metadata
