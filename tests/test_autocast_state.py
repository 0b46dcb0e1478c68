"""Entering and leaving: what is put back, in every order, thread and accident."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from versions import with_autocast

from amp_script import autocast
from amp_script.jit_state import AmbientState

X = torch.ones(2, 2)


def nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Iterator[None]:
    before = AmbientState.current(), nesting()
    yield
    assert (AmbientState.current(), nesting()) == before


def dtype_now() -> torch.dtype:
    return torch.mm(X, X).dtype


class TestReentry:
    def test_one_instance_nested_in_itself(self) -> None:
        region = autocast("cpu")
        with region:
            with region:
                with region:
                    assert dtype_now() is torch.bfloat16
                assert dtype_now() is torch.bfloat16
            assert dtype_now() is torch.bfloat16
        assert dtype_now() is torch.float32

    def test_one_instance_around_and_inside_another(self) -> None:
        outer, inner = autocast("cpu"), autocast("cpu", enabled=False)
        with outer, inner, outer, inner:
            assert dtype_now() is torch.float32
        with inner, outer, inner, outer:
            assert dtype_now() is torch.bfloat16

    def test_an_entry_puts_back_what_it_found_not_what_the_first_found(self) -> None:
        region = autocast("cpu", torch.bfloat16, cache_enabled=False)
        with torch.autocast("cpu", torch.float16):
            with region:
                pass
            assert dtype_now() is torch.float16
            assert torch.is_autocast_cache_enabled()
        with region:
            pass
        assert dtype_now() is torch.float32

    def test_mixed_with_torchs(self) -> None:
        region = autocast("cpu")
        with region, torch.autocast("cpu", torch.float16), region:
            assert dtype_now() is torch.bfloat16
        with torch.autocast("cpu", torch.float16), region:
            assert dtype_now() is torch.bfloat16

    def test_the_cast_cache_lives_until_the_outermost_region_is_left(self) -> None:
        weight = torch.ones(2, 2, requires_grad=True)
        region = autocast("cpu")
        with region:
            first = torch.mm(X, weight)
            with region:
                pass
            with torch.no_grad():
                weight.mul_(2)
            assert torch.equal(torch.mm(X, weight), first)
        with region:
            assert torch.equal(torch.mm(X, weight), 2 * first)

    def test_the_target_of_as_is_the_instance(self) -> None:
        region = autocast("cpu")
        with region as target:
            assert target is region

    def test_recursion(self) -> None:
        @autocast("cpu", torch.bfloat16)
        def halve(depth: int) -> list[torch.dtype]:
            below = halve(depth - 1) if depth else []
            return [*below, dtype_now()]

        assert halve(5) == [torch.bfloat16] * 6

    def test_it_is_torchs_subclass(self) -> None:
        assert isinstance(autocast("cpu"), torch.autocast)
        assert isinstance(autocast("cpu"), autocast)


class TestAccidents:
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_exceptions_pass_and_the_state_is_put_back(self, error: type[BaseException]) -> None:
        region = autocast("cpu")
        with pytest.raises(error), region, region:
            raise error
        assert dtype_now() is torch.float32

    def test_an_entry_that_fails_changes_nothing(self) -> None:
        """Torch leaves autocast as the failed entry set it."""
        region = autocast("cpu", "half", enabled=False)  # type: ignore[arg-type]  # the case
        with autocast("cpu"):
            with pytest.raises(TypeError):
                region.__enter__()
            assert dtype_now() is torch.bfloat16
            assert nesting() == 1
        flag = autocast("cpu", torch.float16, cache_enabled=1)  # type: ignore[arg-type]  # the case
        with pytest.raises(TypeError):
            flag.__enter__()
        assert dtype_now() is torch.float32

    @pytest.mark.parametrize("entered", [False, True])
    def test_leaving_what_was_not_entered_is_an_error(self, entered: bool) -> None:
        region, other = autocast("cpu"), autocast("cpu")
        with ExitStack() as stack:
            if entered:
                stack.enter_context(other)
            with pytest.raises(RuntimeError, match="not entered"):
                region.__exit__(None, None, None)
            assert dtype_now() is (torch.bfloat16 if entered else torch.float32)

    def test_leaving_in_another_thread_is_an_error_there_and_changes_nothing(self) -> None:
        region = autocast("cpu")
        with region, ThreadPoolExecutor(1) as pool:
            leave = pool.submit(region.__exit__, None, None, None)
            with pytest.raises(RuntimeError, match="this thread has not entered"):
                leave.result()
            assert dtype_now() is torch.bfloat16

    def test_a_generator_that_is_dropped_in_its_region(self) -> None:
        """Its region is left late, under one entered after it."""

        def body() -> Iterator[None]:
            with autocast("cpu", torch.bfloat16):
                yield

        generator = body()
        next(generator)
        with autocast("cpu", torch.float16):
            del generator
            gc.collect()
            assert dtype_now() is torch.float16
        assert dtype_now() is torch.float32

    def test_instances_are_freed_when_left(self) -> None:
        region = autocast("cpu")
        with region:
            pass
        seen = weakref.ref(region)
        del region
        gc.collect()
        assert seen() is None


REGIONS = [
    autocast(device, dtype, enabled, cache)
    for device in ("cpu", "xpu")
    for dtype in (torch.bfloat16, torch.float16)
    for enabled in (True, False)
    for cache in (True, False)
]


class TestOrder:
    def test_first_in_first_out(self) -> None:
        first, second = autocast("cpu", torch.bfloat16), autocast("cpu", torch.float16)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert dtype_now() is torch.float16
        second.__exit__(None, None, None)
        assert dtype_now() is torch.float32

    def test_two_device_types_do_not_wait_for_each_other(self) -> None:
        cpu, xpu = autocast("cpu"), autocast("xpu")
        cpu.__enter__()
        xpu.__enter__()
        cpu.__exit__(None, None, None)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("xpu")
        xpu.__exit__(None, None, None)
        assert not torch.is_autocast_enabled("xpu")

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from(REGIONS), max_size=6), st.randoms(use_true_random=False))
    def test_any_order_ends_where_it_began(
        self, entered: list[autocast], order: random.Random
    ) -> None:
        """And while regions are open, the last entered of each device decides."""
        leaving = list(entered)
        order.shuffle(leaving)
        before = AmbientState.current(), nesting()
        open_regions = []
        for region in entered:
            region.__enter__()
            open_regions.append(region)
        for region in leaving:
            region.__exit__(None, None, None)
            last = max(i for i, other in enumerate(open_regions) if other is region)
            del open_regions[last]
            for device in ("cpu", "xpu"):
                innermost = [r for r in open_regions if r.device == device]
                now = AmbientState.current().device(device)
                if innermost:
                    expected = innermost[-1]._enabled, innermost[-1].fast_dtype
                else:
                    found = before[0].device(device)
                    expected = found.enabled, found.dtype
                assert (now.enabled, now.dtype) == expected
        assert (AmbientState.current(), nesting()) == before


class TestThreads:
    def test_the_state_belongs_to_the_thread(self) -> None:
        with autocast("cpu"), ThreadPoolExecutor(1) as pool:
            assert pool.submit(dtype_now).result() is torch.float32

    def test_sixteen_threads_on_one_instance_and_one_function(self) -> None:
        """Each in and out at its own pace, nested, with exceptions on the way."""
        shared = autocast("cpu", torch.bfloat16)
        start = threading.Barrier(16)

        @autocast("cpu", torch.float16)
        def decorated(depth: int, accident: bool) -> None:
            assert dtype_now() is torch.float16
            with shared:
                assert dtype_now() is torch.bfloat16
                if depth:
                    decorated(depth - 1, accident)
                elif accident:
                    raise ZeroDivisionError
            assert dtype_now() is torch.float16

        def work(seed: int) -> None:
            rng = random.Random(seed)
            before = AmbientState.current(), nesting()
            start.wait()
            for _ in range(100):
                accident = rng.random() < 0.5
                try:
                    with shared:
                        decorated(rng.randrange(4), accident)
                    assert not accident
                except ZeroDivisionError:
                    assert accident
                assert (AmbientState.current(), nesting()) == before

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(work, range(16)))
        finally:
            sys.setswitchinterval(interval)

    def test_the_cast_of_one_thread_is_right_while_another_leaves(self) -> None:
        """The cast cache is the process's, and clearing it must not show."""
        weight = torch.randn(8, 8, requires_grad=True)
        x = torch.randn(8, 8)
        with autocast("cpu"):
            expected = torch.mm(x, weight)

        def work(_: int) -> None:
            for _ in range(50):
                with autocast("cpu"):
                    assert torch.equal(torch.mm(x, weight), expected)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))

    def test_asyncio_tasks_in_with_blocks_end_where_they_began(self) -> None:
        """A ``with`` around an ``await`` shares the thread's state; leaving puts all back."""

        async def task(pause: float, region: autocast) -> None:
            with region:
                await asyncio.sleep(pause)

        async def main() -> None:
            regions = [autocast("cpu", dtype) for dtype in (torch.bfloat16, torch.float16)] * 3
            await asyncio.gather(*(task(0.002 * (i % 4), r) for i, r in enumerate(regions)))

        asyncio.run(main())


class TestCopies:
    @pytest.mark.parametrize(
        "clone", [copy.copy, copy.deepcopy, lambda region: pickle.loads(pickle.dumps(region))]
    )
    @pytest.mark.parametrize("device_type", with_autocast("cpu", "cuda", "mtia", "xla"))
    def test_a_copy_is_a_region_of_its_own(self, clone, device_type: str) -> None:
        region = autocast(device_type, torch.float16, enabled=False, cache_enabled=False)
        copied = clone(region)
        assert type(copied) is autocast
        assert copied is not region
        assert vars(copied) == vars(region)
        with region, copied:
            assert not torch.is_autocast_cache_enabled()
        assert "_key" not in region.__getstate__()


class TestSubclasses:
    def test_arguments_of_its_own(self) -> None:
        class Half(autocast):
            def __init__(self, *, name: str) -> None:
                super().__init__("cpu", torch.float16)
                self.name = name

        with Half(name="half") as region:
            assert region.name == "half"
            assert dtype_now() is torch.float16
        assert isinstance(region, torch.autocast)

    def test_a_subclass_of_a_subclass(self) -> None:
        class First(autocast):
            pass

        class Second(First):
            entered = 0

            def __enter__(self) -> Second:
                type(self).entered += 1
                return super().__enter__()

        with Second("cpu", torch.float16), Second("cpu", torch.bfloat16):
            assert dtype_now() is torch.bfloat16
        assert Second.entered == 2

    def test_a_subclass_with_another_base(self) -> None:
        class Named:
            def name(self) -> str:
                return type(self).__name__

        class Both(Named, autocast):
            pass

        with Both("cpu") as region:
            assert region.name() == "Both"
            assert dtype_now() is torch.bfloat16
