"""The ambient state as a value, the shield, and the JIT pass flag under threads."""

from __future__ import annotations

import copy
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch

from amp_script.devices import is_autocast_available, with_autocast
from amp_script.errors import ArgumentError
from amp_script.jit_state import AmbientState, DeviceState, jit_autocast_pass, shield

DEVICE_TYPES = with_autocast()


def pass_flag() -> bool:
    now: bool = torch._C._jit_set_autocast_mode(True)
    torch._C._jit_set_autocast_mode(now)
    return now


def every_device_type() -> list[str]:
    """Return all that torch knows, which it lists when asked for another."""
    with pytest.raises(RuntimeError) as error:
        torch.device("another")
    listed = re.search(r"Expected one of (.*) device type", str(error.value))
    assert listed
    return listed.group(1).split(", ")


@pytest.fixture(params=[True, False], autouse=True)
def flag_before(request: pytest.FixtureRequest) -> Iterator[bool]:
    original = torch._C._jit_set_autocast_mode(request.param)
    yield request.param
    assert pass_flag() is request.param
    torch._C._jit_set_autocast_mode(original)


def in_a_thread(function: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


class TestAmbientState:
    # Torch lists names that it asks nobody to use, and says so of the first one used.
    @pytest.mark.filterwarnings("ignore:.* is no longer used as device type:UserWarning")
    def test_answers_as_torch_does_for_every_device_type(self) -> None:
        state = AmbientState.current()
        assert [name for name, _ in state.devices] == list(DEVICE_TYPES)
        assert set(DEVICE_TYPES) == set(filter(is_autocast_available, every_device_type()))
        for name in DEVICE_TYPES:
            assert state.device(name) == DeviceState(
                torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)
            )
        assert state.cache_enabled is torch.is_autocast_cache_enabled()

    @pytest.mark.parametrize("device_type", DEVICE_TYPES)
    def test_follows_each_device_type(self, device_type: str) -> None:
        before = AmbientState.current()
        dtype = torch.get_autocast_dtype(device_type)
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, torch.float64)
        try:
            inside = AmbientState.current()
        finally:
            torch.set_autocast_enabled(device_type, False)
            torch.set_autocast_dtype(device_type, dtype)
        assert inside == before.with_device(device_type, DeviceState(True, torch.float64))
        assert inside.device(device_type) == DeviceState(True, torch.float64)
        assert inside.any_enabled
        assert not before.any_enabled
        assert AmbientState.current() == before

    def test_sees_the_default_dtype_of_a_device_that_is_off(self) -> None:
        before = AmbientState.current()
        with torch.autocast("cpu", torch.float16, enabled=False):
            assert AmbientState.current() == before.with_device(
                "cpu", DeviceState(False, torch.float16)
            )

    def test_sees_the_cache_flag(self) -> None:
        with torch.autocast("cpu", cache_enabled=False):
            assert not AmbientState.current().cache_enabled

    def test_equal_states_are_one_key(self) -> None:
        with torch.autocast("cpu", torch.float16):
            first = AmbientState.current()
        with torch.autocast("cpu", torch.float16):
            second = AmbientState.current()
        assert first == second
        assert {first: "variant"}[second] == "variant"
        assert first != AmbientState.current()

    def test_disabled_keeps_dtypes_and_the_cache_flag(self) -> None:
        with torch.autocast("cpu", torch.float16, cache_enabled=False):
            disabled = AmbientState.disabled()
            assert disabled.device("cpu") == DeviceState(False, torch.float16)
            assert not disabled.cache_enabled
            assert not disabled.any_enabled

    def test_belongs_to_the_thread(self) -> None:
        outside = AmbientState.current()
        seen = []
        with torch.autocast("cpu", torch.float16):
            in_a_thread(lambda: seen.append(AmbientState.current()))
        assert seen == [outside]

    def test_names_what_has_autocast_when_asked_for_what_has_none(self) -> None:
        with pytest.raises(KeyError, match=r"'vulkan'.*cpu, cuda"):
            AmbientState.current().device("vulkan")
        with pytest.raises(KeyError, match="vulkan"):
            AmbientState.current().with_device("vulkan", DeviceState(True, torch.float16))

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
    def test_copies_are_equal(self, clone: Callable[[AmbientState], AmbientState]) -> None:
        state = AmbientState.current()
        assert clone(state) == state
        assert hash(clone(state)) == hash(state)


class TestShield:
    @pytest.mark.parametrize("device_type", DEVICE_TYPES)
    def test_turns_every_device_type_off_and_back_on(self, device_type: str) -> None:
        torch.set_autocast_enabled(device_type, True)
        try:
            with shield():
                assert not torch.is_autocast_enabled(device_type)
                assert AmbientState.current() == AmbientState.disabled()
            assert torch.is_autocast_enabled(device_type)
        finally:
            torch.set_autocast_enabled(device_type, False)

    def test_no_operator_is_cast(self) -> None:
        x = torch.ones(2, 2)
        with torch.autocast("cpu"):
            with shield():
                assert torch.mm(x, x).dtype is torch.float32
            assert torch.mm(x, x).dtype is torch.bfloat16

    def test_regions_inside_work_and_nest(self) -> None:
        x = torch.ones(2, 2)
        with torch.autocast("cpu"), shield():
            with torch.autocast("cpu", torch.float16):
                assert torch.mm(x, x).dtype is torch.float16
                with shield():
                    assert torch.mm(x, x).dtype is torch.float32
                assert torch.mm(x, x).dtype is torch.float16
            assert torch.mm(x, x).dtype is torch.float32

    def test_the_jit_pass_sees_autocast_off(self) -> None:
        def product(x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

        x = torch.ones(2, 2)
        with jit_autocast_pass(True), torch.autocast("cpu"), shield():
            compiled = torch.jit.script(product)
            assert {compiled(x).dtype for _ in range(4)} == {torch.float32}

    def test_restores_after_an_exception(self) -> None:
        with torch.autocast("cpu"):
            with pytest.raises(KeyboardInterrupt), shield():
                raise KeyboardInterrupt
            assert torch.is_autocast_enabled("cpu")

    def test_belongs_to_the_thread(self) -> None:
        def other() -> None:
            with torch.autocast("cpu"):
                assert torch.is_autocast_enabled("cpu")

        with shield():
            in_a_thread(other)


class TestJitAutocastPass:
    @pytest.mark.parametrize("wanted", [True, False])
    def test_sets_and_restores(self, wanted: bool, flag_before: bool) -> None:
        with jit_autocast_pass(wanted):
            assert pass_flag() is wanted
        assert pass_flag() is flag_before

    def test_nested_blocks_the_inner_decides(self) -> None:
        with jit_autocast_pass(False):
            with jit_autocast_pass(True):
                assert pass_flag()
            assert not pass_flag()

    @pytest.mark.parametrize("exception", [ValueError, KeyboardInterrupt, GeneratorExit])
    def test_restores_after_an_exception(
        self, exception: type[BaseException], flag_before: bool
    ) -> None:
        with pytest.raises(exception), jit_autocast_pass(not flag_before):
            raise exception
        assert pass_flag() is flag_before

    @pytest.mark.parametrize("value", [0, 1, None, "off"])
    def test_refuses_what_is_no_bool(self, value: object) -> None:
        block = jit_autocast_pass(value)  # type: ignore[arg-type]  # the wrong type is the case
        with pytest.raises(ArgumentError, match=f"{value!r}.*{type(value).__name__}"):
            block.__enter__()

    def test_decorates(self) -> None:
        @jit_autocast_pass(False)
        def ask() -> bool:
            return pass_flag()

        assert not ask()

    @pytest.mark.parametrize("order", ["first left first", "last left first"])
    @pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
    def test_left_in_any_order(
        self, order: str, wanted: tuple[bool, bool], flag_before: bool
    ) -> None:
        first, last = map(jit_autocast_pass, wanted)
        first.__enter__()
        last.__enter__()
        assert pass_flag() is wanted[1]
        leaving: list[tuple[AbstractContextManager[None], bool]] = [(first, wanted[1])]
        leaving.insert(order == "first left first", (last, wanted[0]))
        for index, (block, flag_after) in enumerate(leaving):
            in_a_thread(lambda block=block: block.__exit__(None, None, None))
            assert pass_flag() is (flag_before if index else flag_after)

    def test_many_threads_restore_the_flag(self, flag_before: bool) -> None:
        start = threading.Barrier(16)

        def enter_and_leave(index: int) -> None:
            start.wait()
            for turn in range(200):
                with jit_autocast_pass((index + turn) % 3 == 0):
                    pass_flag()

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(enter_and_leave, range(16)))
        assert pass_flag() is flag_before
