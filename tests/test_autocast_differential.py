"""autocast against the installed torch's, case by case: errors, warnings and state.

Each case is observed twice, with torch's class and with ours, and the observations must be equal.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import amp_script


class Subclass(amp_script.autocast):
    """Made by ``__init__``, where the class itself is made in one step."""


DEVICE_TYPES = (
    *("cpu", "cuda", "xpu", "mps", "mtia", "maia", "ipu", "hpu", "xla"),
    *("privateuse1", "cpu:0", "cuda:0", "xpu:1", "nonsense", "CPU", ""),
)
DTYPES = (None, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)
ENABLED = (True, False)
CACHE_ENABLED = (None, True, False)
OURS = (amp_script.autocast, Subclass)

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.10",
    reason="until 2.10 torch warned in other cases and words, and `as` gave None; ours is as since",
)


@dataclass
class Observation:
    """What can be seen of one region: made, entered, left, and left by an exception."""

    raised: tuple[type[Exception], str] | None = None
    warned: list[tuple[type[Warning], str, str]] = field(default_factory=list)
    attributes: tuple[object, ...] = ()
    target: bool = False
    inside: tuple[object, ...] = ()
    after: tuple[object, ...] = ()
    after_exception: tuple[object, ...] = ()


def state(device_type: str) -> tuple[Any, ...]:
    """Return all that a region sets, and how deep the thread is in regions."""
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        nesting,
    )


def restore(before: tuple[Any, ...]) -> None:
    """Put the state of ``"cpu"`` back, where torch has not after an entry that failed."""
    enabled, dtype, cache_enabled, nesting = before
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", dtype)
    torch.set_autocast_cache_enabled(cache_enabled)
    while state("cpu")[-1] != nesting:
        torch.autocast_decrement_nesting()


def observe(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Observation:
    seen = Observation()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            region = make(*args, **kwargs)
            device = region.device
            seen.attributes = (
                device,
                region.fast_dtype,
                region._enabled,
                region._cache_enabled,
            )
            with region as target:
                seen.target = target is region
                seen.inside = state(device)
            seen.after = state(device)
            try:
                with region:
                    raise ZeroDivisionError
            except ZeroDivisionError:
                seen.after_exception = state(device)
        except Exception as error:
            seen.raised = (type(error), str(error))
    seen.warned = [(w.category, str(w.message), w.filename) for w in caught]
    return seen


def assert_same(*args: Any, **kwargs: Any) -> None:
    before = state("cpu")
    expected = observe(torch.autocast, *args, **kwargs)
    restore(before)
    for ours in OURS:
        assert observe(ours, *args, **kwargs) == expected, (ours, args, kwargs)
        assert state("cpu") == before, (ours, args, kwargs)


def ambients(device_type: str) -> Iterator[AbstractContextManager[object]]:
    yield nullcontext()
    if device_type in ("cpu", "xpu", "mtia"):
        for dtype, enabled, cache in itertools.product(DTYPES[1:3], ENABLED, ENABLED):
            yield torch.autocast(device_type, dtype, enabled, cache)


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_every_argument(device_type: str) -> None:
    for ambient in ambients(device_type):
        with ambient:
            for arguments in itertools.product(DTYPES, ENABLED, CACHE_ENABLED):
                assert_same(device_type, *arguments)


@pytest.mark.parametrize("device_type", DEVICE_TYPES)
def test_defaults_and_keywords(device_type: str) -> None:
    assert_same(device_type)
    assert_same(device_type=device_type)
    assert_same(cache_enabled=False, enabled=True, dtype=torch.float16, device_type=device_type)


@pytest.mark.parametrize("device_type", ["meta", "vulkan", "lazy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_types_without_autocast_are_named(
    device_type: str, dtype: torch.dtype | None
) -> None:
    """Torch names them only where a dtype is given."""
    expected = observe(torch.autocast, device_type, dtype)
    assert expected.raised
    for ours in OURS:
        seen = observe(ours, device_type, dtype)
        assert seen.raised
        assert seen.raised[0] is expected.raised[0] is RuntimeError
        assert device_type in seen.raised[1]
        assert dtype is None or seen == expected


@pytest.mark.parametrize(
    "device_type", [None, 0, 1.5, b"cpu", ["cpu"], torch.device("cpu"), torch.float16]
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_device_types_that_are_no_string(device_type: object, dtype: torch.dtype | None) -> None:
    assert_same(device_type, dtype)


def test_a_string_of_another_class() -> None:
    class Name(str):
        __slots__ = ()

    assert_same(Name("cpu"))


@pytest.mark.parametrize("arguments", [(), ("cpu", None, True, None, 1)])
def test_wrong_numbers_of_arguments(arguments: tuple[object, ...]) -> None:
    for cls in (torch.autocast, *OURS):
        with pytest.raises(TypeError, match="argument"):
            cls(*arguments)


@pytest.mark.parametrize("dtype", ["bfloat16", 5, [], torch.bool, torch.complex64])
def test_dtypes_that_are_none(dtype: object) -> None:
    assert_same("cpu", dtype)
    assert_same("cpu", dtype, enabled=False)


@pytest.mark.parametrize("cache_enabled", [0, 1, "yes"])
def test_cache_flags_that_are_no_bool(cache_enabled: object) -> None:
    assert_same("cpu", cache_enabled=cache_enabled)


@pytest.mark.parametrize("enabled", [0, 1, None, "yes"])
def test_enabled_that_is_no_bool_is_named(enabled: object) -> None:
    """Torch says so on entry, and leaves the outer region's state changed."""
    for ours in OURS:
        with pytest.raises(TypeError, match=f"`enabled`.*{enabled!r}.*{type(enabled).__name__}"):
            ours("cpu", enabled=enabled)


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("bfloat16", [True, False])
@pytest.mark.parametrize("xla", [True, False])
def test_cuda(present: bool, bfloat16: bool, xla: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(torch.cuda.amp.common, "find_spec", lambda name: xla or None)
    for arguments in itertools.product(DTYPES, ENABLED, CACHE_ENABLED):
        assert_same("cuda", *arguments)


@pytest.mark.parametrize("default", DTYPES[1:])
@pytest.mark.parametrize("enabled", ENABLED)
def test_a_default_dtype_that_was_changed(default: torch.dtype, enabled: bool) -> None:
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", default)
    try:
        assert_same("cpu", enabled=enabled)
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_what_the_body_sets_by_hand_is_put_back() -> None:
    def observe_body(cls: type) -> list[tuple[object, ...]]:
        seen = []
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            with cls("cpu", torch.bfloat16):
                torch.set_autocast_enabled("cpu", False)
                torch.set_autocast_dtype("cpu", torch.float32)
                torch.set_autocast_cache_enabled(False)
                seen.append(state("cpu"))
            seen.append(state("cpu"))
        seen.append(state("cpu"))
        return seen

    assert observe_body(amp_script.autocast) == observe_body(torch.autocast)


def test_operators_are_cast_alike_and_the_cast_cache_is_cleared() -> None:
    start = torch.randn(4, 4)
    x = torch.randn(2, 4)

    def products(cls: type, cache: bool) -> list[torch.Tensor]:
        weight = start.clone().requires_grad_()
        with cls("cpu", torch.bfloat16, cache_enabled=cache):
            first = torch.mm(x, weight)
            with cls("cpu", enabled=False):
                plain = torch.mm(x, weight)
            with torch.no_grad():
                weight.add_(1)
            stale = torch.mm(x, weight)
        with cls("cpu", torch.bfloat16, cache_enabled=cache):
            fresh = torch.mm(x, weight)
        return [first, plain, stale, fresh]

    for cache in ENABLED:
        both = products(torch.autocast, cache), products(amp_script.autocast, cache)
        for expected, ours in zip(*both, strict=True):
            assert ours.dtype is expected.dtype
            assert torch.equal(ours, expected)


PRIVATE_BACKEND = """
    import itertools, sys, types, warnings
    sys.path[:0] = {path!r}
    import torch
    import test_autocast_differential as t

    def compare():
        for arguments in itertools.product(t.DTYPES, t.ENABLED, t.CACHE_ENABLED):
            expected = t.observe(torch.autocast, "npu", *arguments)
            for ours in t.OURS:
                seen = t.observe(ours, "npu", *arguments)
                if expected.raised and expected.raised[0] is AssertionError:
                    assert seen.raised and seen.raised[0] is AssertionError, (seen, expected)
                else:
                    assert seen == expected, (arguments, seen, expected)

    def refusal():
        return t.observe(t.OURS[0], "npu").raised[1]

    t.assert_same("npu")
    torch.utils.rename_privateuse1_backend("npu")
    t.assert_same("privateuseone", torch.float16)

    compare()
    assert "no module is registered as `torch.npu`" in refusal(), refusal()
    module = types.ModuleType("npu")
    torch._register_device_module("npu", module)
    compare()
    assert "has no function `get_amp_supported_dtype`" in refusal(), refusal()
    for supported in ([torch.float16], [torch.bfloat16, torch.float32], [], (torch.int8,)):
        module.get_amp_supported_dtype = lambda supported=supported: supported
        compare()
    print("same")
"""


def test_a_private_backend() -> None:
    """In a process of its own, because a backend can be named once."""
    code = textwrap.dedent(PRIVATE_BACKEND.format(path=[str(__file__).rsplit("/", 1)[0]]))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "same\n", result.stderr
