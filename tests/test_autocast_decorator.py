"""``@autocast(...)`` on every kind of function: the body runs in the region, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import sys
import traceback
import types
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from versions import decorates_what_cannot_be_called

from amp_script import autocast, autocast_decorator

X = torch.ones(2, 2)
BF16, F32 = torch.bfloat16, torch.float32


def dtype_now() -> torch.dtype:
    return torch.mm(X, X).dtype


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Iterator[None]:
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()


class TestFunctions:
    def test_the_body_runs_in_the_region(self) -> None:
        @autocast("cpu")
        def function(a: int, *, b: int = 2) -> tuple[int, int, torch.dtype]:
            """Say what it got."""
            return a, b, dtype_now()

        assert function(1) == (1, 2, BF16)
        assert function(a=1, b=3) == (1, 3, BF16)
        assert dtype_now() is F32

    def test_it_looks_like_the_function(self) -> None:
        def function(a: int, /, b: str = "b", *args: int, c: float, **kwargs: None) -> bool:
            """Do nothing."""
            return True

        function.mark = "kept"  # type: ignore[attr-defined]
        decorated = autocast("cpu")(function)
        assert isinstance(decorated, types.FunctionType)
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "mark"):
            assert getattr(decorated, name) == getattr(function, name)
        assert inspect.signature(decorated) == inspect.signature(function)
        assert typing.get_type_hints(decorated) == typing.get_type_hints(function)
        assert decorated.__globals__ is function.__globals__

    def test_what_it_wraps_is_not_in_the_region(self) -> None:
        decorated = autocast("cpu")(dtype_now)
        assert inspect.unwrap(decorated)() is F32
        assert decorated() is BF16

    def test_closures_see_later_changes(self) -> None:
        count = 0

        @autocast("cpu")
        def increment() -> int:
            nonlocal count
            count += 1
            return count

        increment()
        count = 10
        assert increment() == 11
        assert count == 11

    @pytest.mark.parametrize("name", ["args", "kwargs", "names", "region", "func", "twin", "make"])
    def test_closures_over_any_name(self, name: str) -> None:
        namespace: dict[str, Any] = {"autocast": autocast, "dtype_now": dtype_now}
        exec(
            f"def outer({name}):\n"
            f"    @autocast('cpu')\n"
            f"    def function(): return {name}, dtype_now()\n"
            f"    return function\n",
            namespace,
        )
        assert namespace["outer"](7)() == (7, BF16)

    def test_two_regions(self) -> None:
        @autocast("cpu", torch.float16)
        @autocast("cpu", BF16)
        def inner_decides() -> torch.dtype:
            return dtype_now()

        assert inner_decides() is BF16

    def test_torchs_regions_decorate_too(self) -> None:
        assert autocast_decorator(torch.autocast("cpu"), dtype_now)() is BF16
        assert autocast_decorator(autocast("cpu"), dtype_now)() is BF16

    def test_lambdas(self) -> None:
        assert autocast("cpu")(lambda: dtype_now())() is BF16

    def test_builtins_partials_classes_modules_and_objects(self) -> None:
        region = autocast("cpu")
        linear = nn.Linear(2, 2)
        assert region(torch.mm)(X, X).dtype is BF16
        assert region(functools.partial(torch.mm, X))(X).dtype is BF16
        assert region(linear)(X).dtype is BF16
        assert region(linear.forward)(X).dtype is BF16
        assert region(type("Now", (), {"__call__": lambda self: dtype_now()})())() is BF16
        assert isinstance(region(nn.Linear)(2, 2), nn.Linear)
        assert region(torch.jit.script(lambda_source))(X).dtype is BF16

    def test_functions_under_decorators_that_are_classes(self) -> None:
        class Calls:
            def __init__(self, function: Callable[[], torch.dtype]) -> None:
                self.__wrapped__ = function

            def __call__(self) -> torch.dtype:
                return self.__wrapped__()

        assert autocast("cpu")(Calls(dtype_now))() is BF16
        assert autocast("cpu")(functools.lru_cache(dtype_now))() is BF16

    def test_the_traceback_shows_the_functions_own_line(self) -> None:
        @autocast("cpu")
        def fails() -> None:
            raise ZeroDivisionError("here")

        with pytest.raises(ZeroDivisionError) as error:
            fails()
        frames = traceback.extract_tb(error.value.__traceback__)
        assert frames[-1].line == 'raise ZeroDivisionError("here")'
        assert {frame.filename for frame in frames} == {__file__}
        assert dtype_now() is F32

    @pytest.mark.parametrize("what", [None, 5, "forward", X, [dtype_now]])
    def test_what_cannot_be_called_is_refused(self, what: object) -> None:
        with pytest.raises(TypeError, match=rf"callable, but got {type(what).__name__}.*\n.*with "):
            autocast("cpu")(what)  # type: ignore[type-var]  # the case
        with pytest.raises(TypeError, match="requires a callable"):
            autocast_decorator(autocast("cpu"), what)  # type: ignore[type-var]  # the case

    @pytest.mark.skipif(
        decorates_what_cannot_be_called(), reason="this torch has no refusal to compare with"
    )
    def test_the_refusal_is_torchs_but_for_the_name(self) -> None:
        messages = []
        for cls in (torch.autocast, autocast):
            with pytest.raises(TypeError) as error:
                cls("cpu")(None)  # type: ignore[arg-type, type-var]  # the case
            messages.append(str(error.value).replace("amp_script.", "torch."))
        assert messages[0] == messages[1]

    def test_a_region_that_is_disabled_for_its_dtype_warns_where_it_is_made(self) -> None:
        with pytest.warns(UserWarning, match="CPU Autocast only supports") as caught:

            @autocast("cpu", torch.float32)
            def function() -> torch.dtype:
                return dtype_now()

        assert caught[0].filename == __file__
        assert function() is F32


def lambda_source(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


class Methods:
    @autocast("cpu")
    def plain(self, value: int) -> tuple[object, int, torch.dtype]:
        return self, value, dtype_now()

    @staticmethod
    @autocast("cpu")
    def static(value: int) -> tuple[int, torch.dtype]:
        return value, dtype_now()

    @autocast("cpu")
    @staticmethod
    def static_outside(value: int) -> tuple[int, torch.dtype]:
        return value, dtype_now()

    @classmethod
    @autocast("cpu")
    def of_class(cls, value: int) -> tuple[type, int, torch.dtype]:
        return cls, value, dtype_now()

    @autocast("cpu")
    @classmethod
    def of_class_outside(cls, value: int) -> tuple[type, int, torch.dtype]:
        return cls, value, dtype_now()

    @property
    @autocast("cpu")
    def dtype(self) -> torch.dtype:
        return dtype_now()

    @functools.cached_property
    @autocast("cpu")
    def cached(self) -> torch.dtype:
        return dtype_now()

    @autocast("cpu")
    @functools.lru_cache  # noqa: B019  # the case
    def remembered(self) -> torch.dtype:
        return dtype_now()


class TestMethods:
    def test_every_kind_of_method(self) -> None:
        obj = Methods()
        assert obj.plain(1) == (obj, 1, BF16)
        assert Methods.plain(obj, 1) == (obj, 1, BF16)
        for holder in (obj, Methods):
            assert holder.static(1) == (1, BF16)
            assert holder.static_outside(1) == (1, BF16)
            assert holder.of_class(1) == (Methods, 1, BF16)
            assert holder.of_class_outside(1) == (Methods, 1, BF16)
        assert obj.dtype is obj.cached is obj.remembered() is BF16

    def test_a_subclass_inherits_and_calls_up(self) -> None:
        class Sub(Methods):
            @autocast("cpu", torch.float16)
            def plain(self, value: int) -> tuple[object, int, torch.dtype]:
                assert dtype_now() is torch.float16
                return super().plain(value)

        obj = Sub()
        assert obj.plain(1) == (obj, 1, BF16)

    def test_forward_of_a_module_and_of_one_instance(self) -> None:
        class Net(nn.Linear):
            @autocast("cpu")
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x)

        assert Net(2, 2)(X).dtype is BF16
        linear = nn.Linear(2, 2)
        linear.forward = autocast("cpu")(linear.forward)
        assert linear(X).dtype is BF16

    def test_a_property_is_refused(self) -> None:
        with pytest.raises(TypeError, match="but got property"):
            autocast("cpu")(property(dtype_now))  # type: ignore[type-var]  # the case


def both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what a function's original and its decorated copy do."""
    return function, autocast("cpu")(function)


class TestGenerators:
    def test_each_step_of_the_body_is_in_the_region_and_the_consumer_is_not(self) -> None:
        @autocast("cpu")
        def body() -> Generator[torch.dtype, None, torch.dtype]:
            try:
                yield dtype_now()
                yield dtype_now()
            finally:
                assert dtype_now() is BF16
            return dtype_now()

        assert inspect.isgeneratorfunction(body)
        generator = body()
        assert next(generator) is BF16
        assert dtype_now() is F32
        with torch.autocast("cpu", torch.float16):
            assert next(generator) is BF16
            assert dtype_now() is torch.float16
        with pytest.raises(StopIteration) as stop:
            next(generator)
        assert stop.value.value is BF16

    def test_two_at_once(self) -> None:
        @autocast("cpu", BF16)
        def first() -> Iterator[torch.dtype]:
            while True:
                yield dtype_now()

        @autocast("cpu", torch.float16)
        def second() -> Iterator[torch.dtype]:
            while True:
                yield dtype_now()

        one, two = first(), second()
        for _ in range(3):
            assert next(one) is BF16
            assert next(two) is torch.float16
        one.close()
        assert next(two) is torch.float16
        del two

    def test_delegation(self) -> None:
        @autocast("cpu")
        def inner() -> Generator[torch.dtype, int, int]:
            received = yield dtype_now()
            return received

        def outer() -> Generator[torch.dtype, int, tuple[int, torch.dtype]]:
            received = yield from inner()
            return received, dtype_now()

        generator = outer()
        assert next(generator) is BF16
        with pytest.raises(StopIteration) as stop:
            generator.send(5)
        assert stop.value.value == (5, F32)

    def test_nothing_runs_before_the_first_step(self) -> None:
        ran = []

        @autocast("cpu")
        def body() -> Iterator[None]:
            ran.append(True)
            yield

        generator = body()
        generator.close()
        assert ran == []

    def test_a_context_manager_and_a_fixture_in_the_usual_order(self) -> None:
        seen = []

        @contextlib.contextmanager
        @autocast("cpu")
        def manager() -> Iterator[torch.dtype]:
            seen.append(dtype_now())
            try:
                yield dtype_now()
            except ZeroDivisionError:
                seen.append(dtype_now())

        with manager() as value:
            assert value is BF16
            assert dtype_now() is F32
            raise ZeroDivisionError
        assert seen == [BF16, BF16]

    def test_a_partial_and_a_callable_object(self) -> None:
        def body(count: int) -> Iterator[torch.dtype]:
            for _ in range(count):
                yield dtype_now()

        class Body:
            def __call__(self) -> Iterator[torch.dtype]:
                yield dtype_now()

        assert list(autocast("cpu")(functools.partial(body, 2))()) == [BF16, BF16]
        assert list(autocast("cpu")(Body())()) == [BF16]

    def test_a_generator_based_coroutine_can_still_be_awaited(self) -> None:
        @autocast("cpu")
        @types.coroutine
        def body() -> Generator[Any, Any, torch.dtype]:
            yield
            return dtype_now()

        async def main() -> torch.dtype:
            return await body()

        coroutine = main()
        coroutine.send(None)
        with pytest.raises(StopIteration) as stop:
            coroutine.send(None)
        assert stop.value.value is BF16


class ThrownError(Exception):
    pass


def counts() -> Generator[Any, Any, Any]:
    """Show what comes in; survive some of it."""
    received: list[Any] = []
    while len(received) < 6:
        try:
            received.append((yield list(received)))
        except ThrownError as thrown:
            received.append(type(thrown))
        except GeneratorExit:
            received.append("closing")
            return received
    return received


def stubborn() -> Generator[Any, Any, Any]:
    while True:
        try:
            yield 1
        except GeneratorExit:
            yield 2


def fragile() -> Generator[Any, Any, Any]:
    try:
        yield 1
    finally:
        raise ThrownError("in finally")


def stops() -> Generator[Any, Any, Any]:
    yield 1
    raise StopIteration("by hand")


STEPS: list[Callable[[Any], Any]] = [
    lambda g: next(g),
    lambda g: g.send(None),
    lambda g: g.send(5),
    lambda g: g.throw(ThrownError("now")),
    lambda g: g.throw(ThrownError),
    lambda g: g.throw(GeneratorExit()),
    lambda g: g.throw(StopIteration(3)),
    lambda g: g.throw(KeyboardInterrupt()),
    lambda g: g.close(),
]


def outcome(step: Callable[[Any], Any], generator: Any) -> tuple[Any, ...]:
    try:
        return ("returned", step(generator))
    except BaseException as error:
        cause = type(error.__cause__), type(error.__context__)
        return ("raised", type(error), str(error), getattr(error, "value", None), cause)


class TestGeneratorProtocol:
    """A decorated generator answers as its original does, to every order of steps."""

    @pytest.mark.parametrize("body", [counts, stubborn, fragile, stops])
    def test_every_three_steps(self, body: Callable[[], Any]) -> None:
        for first in STEPS:
            for second in STEPS:
                for third in STEPS:
                    original, decorated = both(body)
                    one, two = original(), decorated()
                    for step in (first, second, third, STEPS[0]):
                        assert outcome(step, two) == outcome(step, one)
                    for generator in (one, two):
                        with contextlib.suppress(RuntimeError, ThrownError):
                            generator.close()
                    # What ignores its closing says so once more when it is collected.
                    if body is stubborn:
                        for generator in (one, two):
                            with contextlib.suppress(BaseException):
                                generator.throw(ThrownError)

    def test_a_thrown_exception_gains_no_context_of_ours(self) -> None:
        original, decorated = both(fragile)
        for make in (original, decorated):
            generator = make()
            next(generator)
            with pytest.raises(ThrownError) as error:
                generator.throw(ZeroDivisionError("first"))
            assert isinstance(error.value.__context__, ZeroDivisionError)
            assert error.value.__context__.__context__ is None


class Pause:
    """Awaits once, and gives back what it is sent."""

    def __await__(self) -> Generator[str, Any, Any]:
        received = yield "paused"
        return received


class TestCoroutines:
    def test_the_body_is_in_the_region_and_what_runs_between_is_not(self) -> None:
        @autocast("cpu")
        async def body() -> tuple[torch.dtype, torch.dtype]:
            first = dtype_now()
            await asyncio.sleep(0)
            return first, dtype_now()

        async def other() -> list[torch.dtype]:
            seen = []
            for _ in range(3):
                seen.append(dtype_now())
                await asyncio.sleep(0)
            return seen

        async def main() -> None:
            bodies = await asyncio.gather(body(), other(), body(), other())
            assert bodies == [(BF16, BF16), [F32] * 3] * 2

        assert inspect.iscoroutinefunction(body)
        asyncio.run(main())

    def test_what_it_awaits_is_its_own_code_too(self) -> None:
        async def helper() -> torch.dtype:
            await asyncio.sleep(0)
            return dtype_now()

        @autocast("cpu")
        async def body() -> torch.dtype:
            return await helper()

        assert asyncio.run(body()) is BF16

    def test_cancelling(self) -> None:
        seen = []

        @autocast("cpu")
        async def body() -> None:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                seen.append(dtype_now())
                raise

        async def main() -> None:
            task = asyncio.create_task(body())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert seen == [BF16]

    def test_values_and_exceptions_go_through(self) -> None:
        @autocast("cpu")
        async def body() -> Any:
            received = await Pause()
            try:
                await Pause()
            except ThrownError:
                return received, dtype_now()

        coroutine = body()
        assert coroutine.send(None) == "paused"
        assert coroutine.send(7) == "paused"
        with pytest.raises(StopIteration) as stop:
            coroutine.throw(ThrownError())
        assert stop.value.value == (7, BF16)

    def test_closing(self) -> None:
        seen = []

        @autocast("cpu")
        async def body() -> None:
            try:
                await Pause()
            finally:
                seen.append(dtype_now())

        coroutine = body()
        coroutine.send(None)
        coroutine.close()
        assert seen == [BF16]

    def test_a_coroutine_never_awaited_is_reported(self) -> None:
        @autocast("cpu")
        async def body() -> None: ...

        coroutine = body()
        with pytest.warns(RuntimeWarning, match="never awaited"):
            del coroutine

    def test_a_method_and_a_callable_object(self) -> None:
        class Service:
            @autocast("cpu")
            async def answer(self) -> torch.dtype:
                return dtype_now()

            async def __call__(self) -> torch.dtype:
                return dtype_now()

        assert asyncio.run(Service().answer()) is BF16
        assert asyncio.run(autocast("cpu")(Service())()) is BF16


class TestAsyncGenerators:
    def test_each_step_is_in_the_region_and_the_consumer_is_not(self) -> None:
        closed = []

        @autocast("cpu")
        async def body() -> AsyncIterator[torch.dtype]:
            try:
                for _ in range(3):
                    yield dtype_now()
                    await asyncio.sleep(0)
            finally:
                await asyncio.sleep(0)
                closed.append(dtype_now())

        async def main() -> None:
            seen = []
            async for dtype in body():
                seen.append((dtype, dtype_now()))
            assert seen == [(BF16, F32)] * 3
            generator = body()
            async for _ in generator:
                break
            await generator.aclose()

        assert inspect.isasyncgenfunction(body)
        asyncio.run(main())
        assert closed == [BF16, BF16]

    def test_the_protocol_is_the_originals(self) -> None:
        async def body() -> Any:
            received: list[Any] = []
            while len(received) < 4:
                try:
                    received.append((yield list(received)))
                except ThrownError as thrown:
                    received.append(type(thrown))

        steps: list[Callable[[Any], Awaitable[Any]]] = [
            lambda g: g.__anext__(),
            lambda g: g.asend(5),
            lambda g: g.athrow(ThrownError("now")),
            lambda g: g.athrow(GeneratorExit()),
            lambda g: g.athrow(ZeroDivisionError()),
            lambda g: g.aclose(),
        ]

        async def outcome_of(step: Callable[[Any], Awaitable[Any]], generator: Any) -> object:
            try:
                return ("returned", await step(generator))
            except BaseException as error:
                return ("raised", type(error), str(error))

        async def main() -> None:
            for first in steps:
                for second in steps:
                    original, decorated = both(body)
                    one, two = original(), decorated()
                    for step in (first, second, *steps[:3]):
                        assert await outcome_of(step, two) == await outcome_of(step, one)

        asyncio.run(main())

    def test_one_that_is_left_open_is_closed_once_when_the_loop_shuts_down(self) -> None:
        closed, problems = [], []

        @autocast("cpu")
        async def body() -> AsyncIterator[int]:
            try:
                yield 1
                yield 2
            finally:
                await asyncio.sleep(0)
                closed.append(dtype_now())

        async def main() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, c: problems.append(c))
            generator = body()
            await generator.__anext__()
            open_generators.append(generator)

        open_generators: list[Any] = []
        asyncio.run(main())
        assert closed == [BF16]
        assert problems == []
        assert sys.get_asyncgen_hooks() == (None, None)

    def test_an_async_context_manager(self) -> None:
        @contextlib.asynccontextmanager
        @autocast("cpu")
        async def manager() -> AsyncIterator[torch.dtype]:
            yield dtype_now()

        async def main() -> None:
            async with manager() as dtype:
                assert dtype is BF16
                assert dtype_now() is F32

        asyncio.run(main())
