"""Looking up what autocast does: the tables against the installed torch's dispatcher."""

from __future__ import annotations

import pytest
import torch

from amp_script import policy
from amp_script.errors import ArgumentError, UnknownPolicyError
from amp_script.policy import Policy, tables

IN_EVERY_BUILD = ("cpu", "cuda", "xpu", "mps")


@pytest.mark.parametrize("device_type", policy.autocast_device_types())
def test_every_listed_operator_is_on_record(device_type: str) -> None:
    unknown = []
    for operator in policy.listed_operators(device_type):
        name, _, overload = operator.partition(".")
        try:
            policy.lookup(device_type, name, overload)
        except UnknownPolicyError as error:
            unknown.append(str(error))
    assert not unknown


@pytest.mark.parametrize("device_type", IN_EVERY_BUILD)
def test_some_operators_are_listed(device_type: str) -> None:
    assert len(policy.listed_operators(device_type)) > 90


def test_a_name_apart_from_its_overload() -> None:
    assert policy.lookup("cpu", "aten::conv1d") is Policy.LOWER
    assert policy.lookup("cpu", "aten::conv1d", "padding") is Policy.LOWER
    assert policy.lookup("cuda", "aten::conv1d", "padding") is None
    assert policy.lookup("cpu", "aten::prod", "dim_int") is Policy.FLOAT32
    assert policy.lookup("cuda", "aten::prod", "dim_int") is Policy.FLOAT32_OPTIONAL_DTYPE


@pytest.mark.parametrize(
    "name", ["aten::relu", "aten::no_such_operator", "prim::Print", "aten::__getitem__"]
)
def test_what_falls_through(name: str) -> None:
    assert policy.find("cpu", name) is None


def test_a_device_without_autocast_is_an_error() -> None:
    with pytest.raises(ArgumentError, match=r"'meta', which has no autocast.*expected one of cpu"):
        policy.find("meta", "aten::mm")
    with pytest.raises(ArgumentError, match="'no-such-device', which has no autocast"):
        policy.find("no-such-device", "aten::mm")


def test_a_listed_operator_that_is_not_on_record_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without = {name: rule for name, rule in tables.CPU.items() if name != "mm"}
    monkeypatch.setattr("amp_script.policy.registry.TABLES", {"cpu": without})
    with pytest.raises(UnknownPolicyError, match="autocasts aten::mm on 'cpu'") as caught:
        policy.find("cpu", "aten::mm")
    assert (caught.value.operator, caught.value.device_type) == ("aten::mm", "cpu")


@pytest.mark.parametrize("device_type", IN_EVERY_BUILD)
def test_operators_that_go_through_a_dtype_take_one(device_type: str) -> None:
    for operator in policy.listed_operators(device_type):
        name, _, overload = operator.partition(".")
        rule = policy.find(device_type, name, overload)
        assert rule is not None
        schema = torch._C._get_schema(name, overload)
        if rule.policy is Policy.FLOAT32_OPTIONAL_DTYPE:
            assert len(policy.optional_dtype_arguments(schema)) == 1, schema
        if rule.policy is Policy.FLOAT32_APPENDED_DTYPE:
            appended = torch._C._get_schema(name, rule.overload).arguments
            assert [a.name for a in appended[:-1]] == [a.name for a in schema.arguments]
            assert str(appended[-1].real_type) == "ScalarType"


def test_where_a_tensor_may_lie() -> None:
    assert policy.eligible_device_types("cpu") == ("cpu",)
    assert policy.eligible_device_types("cuda") == ("cuda", "xla")
    assert policy.eligible_device_types("mps") == ("mps",)
