"""Recording third-party operators, and those that ``torch.library.register_autocast`` set up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from versions import needs_register_autocast

from amp_script import policy
from amp_script.errors import ArgumentError, PolicyError, UnknownPolicyError
from amp_script.policy import Policy, Rule, observe

NAMESPACE = "amp_script_test_policy"


@pytest.fixture(scope="module", autouse=True)
def library() -> Iterator[torch.library.Library]:
    """Operators with autocast kernels written by hand: ``lower`` on the CPU and CUDA, ``norm``."""
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        library.define("lower(Tensor x, Tensor? y=None) -> Tensor")
        library.define("lower.scaled(Tensor x, float scale) -> Tensor")
        library.define("total(Tensor x, *, ScalarType? dtype=None) -> Tensor")
        library.define("plain(Tensor x) -> Tensor")
        for key in ("AutocastCPU", "AutocastCUDA"):
            library.impl("lower", lambda x, y=None: x, key)
            library.impl("lower.scaled", lambda x, scale: x, key)
            library.impl("total", lambda x, dtype=None: x, key)
        yield library


def _op(name: str) -> str:
    return f"{NAMESPACE}::{name}"


def test_an_unknown_operator_is_an_error_until_it_is_registered() -> None:
    with pytest.raises(UnknownPolicyError, match=f"policy.register\\('{_op('lower')}'"):
        policy.find("cpu", _op("lower"))
    with policy.register(_op("lower"), Policy.LOWER):
        assert policy.lookup("cpu", _op("lower")) is Policy.LOWER
        assert policy.lookup("cpu", _op("lower"), "scaled") is Policy.LOWER
        assert policy.lookup("cuda", _op("lower")) is Policy.LOWER
        assert policy.lookup("xpu", _op("lower")) is None
    with pytest.raises(UnknownPolicyError):
        policy.find("cpu", _op("lower"))


def test_one_overload_on_one_device_type() -> None:
    with policy.register(_op("lower.scaled"), Policy.FLOAT32, device_types=["cuda"]):
        assert policy.lookup("cuda", _op("lower"), "scaled") is Policy.FLOAT32
        with pytest.raises(UnknownPolicyError):
            policy.find("cpu", _op("lower"), "scaled")
        with pytest.raises(UnknownPolicyError):
            policy.find("cuda", _op("lower"))


def test_recording_the_same_again_changes_nothing() -> None:
    first = policy.register(_op("lower"), Policy.LOWER)
    second = policy.register(_op("lower"), Policy.LOWER)
    second.undo()
    assert policy.lookup("cpu", _op("lower")) is Policy.LOWER
    first.undo()
    first.undo()
    with pytest.raises(UnknownPolicyError):
        policy.find("cpu", _op("lower"))


def test_a_contradiction_is_an_error_and_records_nothing() -> None:
    with policy.register(_op("lower.scaled"), Policy.LOWER):
        with pytest.raises(PolicyError, match="LOWER is on record for 'cpu', not FLOAT32"):
            policy.register(_op("lower"), Policy.FLOAT32)
        with pytest.raises(UnknownPolicyError):
            policy.find("cpu", _op("lower"))
    with pytest.raises(PolicyError, match="aten::mm: LOWER is on record for 'cpu', not FLOAT32"):
        policy.register("aten::mm", Policy.FLOAT32)


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        ("lower", 'expected a name such as "mylib::op"'),
        ("::lower", 'expected a name such as "mylib::op"'),
        (_op(""), 'expected a name such as "mylib::op"'),
        (_op("absent"), "torch knows no such operator; import its library first"),
        (_op("lower.absent"), "it has no such overload, but '', 'scaled'"),
        (_op("plain"), "no autocast kernel for any device type, so that eager autocast leaves it"),
    ],
)
def test_names_that_cannot_be_recorded(operator: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy.register(operator, Policy.LOWER)


def test_device_types_that_cannot_be_recorded() -> None:
    with pytest.raises(PolicyError, match=r"no kernel for AutocastXPU.*alone on 'xpu'"):
        policy.register(_op("lower"), Policy.LOWER, device_types=["cpu", "xpu"])
    with pytest.raises(ArgumentError, match=r"'gpu', which has no autocast.*expected one of cpu"):
        policy.register(_op("lower"), Policy.LOWER, device_types="gpu")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Policy.CAST_INPUTS, "CAST_INPUTS needs Rule.dtype"),
        (Policy.FLOAT32_APPENDED_DTYPE, "FLOAT32_APPENDED_DTYPE needs Rule.overload"),
        (Policy.FLOAT32_OPTIONAL_DTYPE, "FLOAT32_OPTIONAL_DTYPE needs an optional dtype"),
    ],
)
def test_rules_that_lack_something(kind: Policy, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        policy.register(_op("lower"), kind)


def test_rules_that_are_complete() -> None:
    for operator, rule in [
        ("lower", Rule(Policy.CAST_INPUTS, dtype=torch.float16)),
        ("lower.scaled", Rule(Policy.FLOAT32_APPENDED_DTYPE, overload="scaled")),
        ("total", Rule(Policy.FLOAT32_OPTIONAL_DTYPE)),
    ]:
        with policy.register(_op(operator), rule):
            name, _, overload = operator.partition(".")
            assert policy.find("cpu", _op(name), overload) == rule


def test_many_threads_record_and_look_up() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(50):
                with policy.register(_op("total"), Policy.FLOAT32):
                    policy.lookup("cpu", "aten::mm")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with pytest.raises(UnknownPolicyError):
        policy.find("cpu", _op("total"))


# torch.library.register_autocast ------------------------------------------------------------------


@needs_register_autocast
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_custom_operator_with_registered_casts(dtype: torch.dtype) -> None:
    name = _op(f"custom_{str(dtype).removeprefix('torch.')}")

    @torch.library.custom_op(name, mutates_args=())
    def double(x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
        return x * 2

    torch.library.register_autocast(name, "cpu", dtype)
    assert policy.find("cpu", name) == Rule(Policy.CAST_INPUTS, dtype=dtype)
    assert policy.find("cuda", name) is None
    seen = observe.observe_operator("cpu", name)
    assert seen.expected in seen.explaining
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert double(torch.ones(2), [torch.ones(2)]).dtype == dtype


@needs_register_autocast
def test_an_operator_of_a_library_with_registered_casts(library: torch.library.Library) -> None:
    library.define("cast(Tensor x) -> Tensor")
    library.impl("cast", lambda x: x * 2, "CPU")
    torch.library.register_autocast(_op("cast"), "cpu", torch.float16, lib=library)
    assert policy.find("cpu", _op("cast")) == Rule(Policy.CAST_INPUTS, dtype=torch.float16)
    assert policy.find("cuda", _op("cast")) is None
    assert observe.observe_operator("cpu", _op("cast")).agrees


@needs_register_autocast
def test_a_record_of_one_s_own_comes_before_registered_casts() -> None:
    name = _op("recorded")

    @torch.library.custom_op(name, mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.library.register_autocast(name, "cpu", torch.float16)
    with policy.register(name, Policy.LOWER, device_types=["cpu"]):
        assert policy.lookup("cpu", name) is Policy.LOWER
    assert policy.lookup("cpu", name) is Policy.CAST_INPUTS
