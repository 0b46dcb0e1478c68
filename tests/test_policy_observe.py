"""The tables against what the installed torch is seen to do, device by device."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

from amp_script import policy
from amp_script.jit_state import AmbientState
from amp_script.policy import Policy, Rule, arguments, observe, reference, tables
from amp_script.policy.tables import Table

pytestmark = pytest.mark.filterwarnings(
    # Operators that torch deprecates are watched like all others.
    "ignore:ComplexHalf support is experimental:UserWarning",
    "ignore:.*is deprecated:UserWarning",
    # Of rms_norm in torch 2.15, which then takes another kernel.
    "ignore:Mismatch dtype between input and weight:UserWarning",
)

# Devices that a build without them can make fake tensors of.
WATCHED = [
    device_type
    for device_type in ("cpu", "cuda", "xpu", "mps", "mtia", "maia")
    if policy.has_autocast(device_type)
]

# Without the device, what these call inside cannot be imitated. Their casts were seen all the same.
NOT_RUN_TO_THE_END = {
    "aten::_convolution",
    "aten::_convolution.deprecated",
    "aten::_cudnn_rnn",
    "aten::_grid_sampler_2d_cpu_fallback",
    "aten::_mps_convolution",
    "aten::_thnn_fused_gru_cell",
    "aten::batch_norm",
    "aten::binary_cross_entropy",
    "aten::ctc_loss.IntList",
    "aten::ctc_loss.Tensor",
    "aten::cudnn_convolution",
    "aten::cudnn_convolution_transpose",
    "aten::grid_sampler",
    "aten::gru_cell",
    "aten::linalg_lstsq",
    "aten::multi_margin_loss",
    "aten::nanquantile",
    "aten::nanquantile.scalar",
    "aten::quantile",
    "aten::quantile.scalar",
    "aten::rms_norm",
    "aten::scaled_dot_product_attention",
}


@pytest.mark.parametrize("device_type", WATCHED)
def test_the_table_says_what_torch_does(device_type: str) -> None:
    report = observe.observe([device_type])
    # Other tests in this process may have registered operators of their own.
    of_torch = [seen for seen in report.observations if seen.operator.startswith("aten::")]
    assert not [each for each in report.disagreements if each in of_torch], str(report)
    assert len(report.observations) >= len(policy.listed_operators(device_type)) - len(
        arguments.BY_NAME
    )
    unfinished = {seen.operator for seen in of_torch if not seen.ran}
    assert unfinished <= NOT_RUN_TO_THE_END


@pytest.mark.parametrize("operator", policy.listed_operators("cpu"))
def test_the_arguments_are_valid(operator: str) -> None:
    if operator in arguments.BY_NAME:
        pytest.skip("no call from a schema can pass the name of a dimension")
    name, _, overload_name = operator.partition(".")
    overload = getattr(
        getattr(torch.ops.aten, name.removeprefix("aten::")), overload_name or "default"
    )

    def make(value: object) -> object:
        if isinstance(value, list):
            return [make(item) for item in value]
        if isinstance(value, arguments.Floating):
            values = torch.linspace(0.1, 0.2, max(1, torch.Size(value.shape).numel()))
            square = value.shape[-2:] == (4, 4)
            return values.reshape(value.shape) + (torch.eye(4) * 0.7 if square else 0)
        if isinstance(value, arguments.Fixed):
            return torch.ones(value.shape, dtype=value.dtype)
        return value

    reference.call(overload, [make(value) for value in arguments.arguments_for(overload._schema)])


def _without(table: Table, operator: str) -> Table:
    return {name: rule for name, rule in table.items() if name != operator}


def test_an_operator_that_the_table_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_script.policy.registry.TABLES", {"cpu": _without(tables.CPU, "mm")})
    seen = observe.observe_operator("cpu", "aten::mm")
    assert not seen.agrees
    assert seen.explaining == (Rule(Policy.LOWER),)
    assert str(seen) == "cpu: aten::mm: no rule on record, LOWER seen"


@pytest.mark.parametrize("wrong", [Policy.FLOAT32, Policy.PROMOTE, Policy.REFUSED])
def test_a_wrong_rule_is_told(monkeypatch: pytest.MonkeyPatch, wrong: Policy) -> None:
    table = {**tables.CPU, "mm": Rule(wrong)}
    monkeypatch.setattr("amp_script.policy.registry.TABLES", {"cpu": table})
    seen = observe.observe_operator("cpu", "aten::mm")
    assert seen.explaining == (Rule(Policy.LOWER),)
    first, second = str(seen).splitlines()
    assert first == f"cpu: aten::mm: {wrong.name} on record, LOWER seen"
    assert second.startswith("  bfloat16 region, (float32): by the rule [")


def test_the_report_says_what_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_script.policy.registry.TABLES", {"cpu": _without(tables.CPU, "mm")})
    report = observe.observe(["cpu"], lambda device_type: ["aten::mm", "aten::bmm"])
    assert [seen.operator for seen in report.disagreements] == ["aten::mm"]
    assert "2 operators observed, 1 differ from the record:\ncpu: aten::mm: no rule" in str(report)


def test_the_caller_s_state_is_left_alone() -> None:
    with torch.autocast("cpu", dtype=torch.float16):
        before = AmbientState.current()
        observe.observe_operator("cpu", "aten::mm")
        observe.observe_operator("cuda", "aten::mm")
        assert AmbientState.current() == before
    assert not torch._C._len_torch_dispatch_stack()


def test_what_is_refused_is_not_logged_and_the_log_is_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = list(logger.filters)
    observe.observe_operator("cpu", "aten::view_as_complex")
    assert not caplog.records
    assert logger.filters == before


def test_watching_in_several_threads_at_once() -> None:
    seen: dict[int, bool] = {}

    def watch(number: int) -> None:
        report = observe.observe(["cpu", "cuda"], lambda device_type: ["aten::mm", "aten::addmm"])
        seen[number] = not report.disagreements

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == dict.fromkeys(range(4), True)
