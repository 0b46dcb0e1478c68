"""Functions that run in a region: what ``@autocast(...)`` makes of each kind of function.

The body of the function runs in the region, and no other code does. A generator stops at each
``yield`` and hands over to its consumer, a coroutine at each ``await`` to whatever the event loop
runs next. Autocast's state belongs to the thread, so a region left open there would cast *their*
operators, and two suspended bodies would put back each other's state. So each step of such a body
enters the region anew, and leaves it before the step's value goes out.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from typing_extensions import Never

from amp_script.twin import Function, Region, decorate_function, refuse

__all__ = ["decorate"]

F = TypeVar("F", bound=Function)


class _Steps(Protocol):
    """A generator, or a coroutine."""

    def send(self, value: object, /) -> object: ...
    def throw(self, error: BaseException, /) -> object: ...


def decorate(region: Region, func: F) -> F:
    """Return ``func`` with its body in ``region``.

    Args:
        region: a context manager that may be entered again, nested and from many threads.
        func: a function, method, coroutine function, generator function, asynchronous generator
            function, or another object that can be called. A ``staticmethod`` or ``classmethod``
            stays one.

    Raises:
        TypeError: ``func`` cannot be called.
    """
    return _decorate(region, func)  # type: ignore[return-value]  # wrapped, so of the same type


def _decorate(region: Region, func: object) -> object:
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(_decorate(region, func.__func__))  # type: ignore[arg-type]  # as func's
    if not callable(func):
        raise TypeError(
            f"autocast()(func) requires a callable, but got {type(func).__name__}. "
            "Did you mean to use autocast as a context manager? For example:\n"
            "    with amp_script.autocast(device_type=...):\n"
            "        output = model(input)"
        )
    for is_kind, decorate_kind in _KINDS:
        if is_kind(func) or is_kind(type(func).__call__):
            decorated = decorate_kind(region, func)  # type: ignore[arg-type]  # of this kind
            return refuse(decorated, "TorchScript has no generators and no coroutines")
    return decorate_function(region, func)


def _decorate_generator(
    region: Region, func: Callable[..., Generator[object, object, object]]
) -> Function:
    in_region = functools.wraps(func)(_stepwise(region, func))
    flags = getattr(getattr(func, "__code__", None), "co_flags", 0)
    return types.coroutine(in_region) if flags & inspect.CO_ITERABLE_COROUTINE else in_region


def _decorate_coroutine(
    region: Region, func: Callable[..., Coroutine[object, object, object]]
) -> Function:
    steps: Callable[..., Awaitable[object]] = types.coroutine(_stepwise(region, func))

    @functools.wraps(func)
    async def in_region(*args: object, **kwargs: object) -> object:
        return await steps(*args, **kwargs)

    return in_region


def _decorate_async_generator(
    region: Region, func: Callable[..., AsyncGenerator[object, object]]
) -> Function:
    steps: Callable[..., Awaitable[object]] = types.coroutine(_stepwise(region, lambda step: step))

    @functools.wraps(func)
    async def in_region(*args: object, **kwargs: object) -> AsyncGenerator[object, object]:
        with region, _unseen_by_the_event_loop():
            body = func(*args, **kwargs)
            step = body.asend(None)
        while True:
            try:
                value = await steps(step)
            except StopAsyncIteration:
                return
            try:
                sent = yield value
            except BaseException as thrown:
                step = body.athrow(thrown)
            else:
                step = body.asend(sent)

    return in_region


_KINDS: tuple[tuple[Callable[[object], bool], Callable[[Region, Never], Function]], ...] = (
    (inspect.isasyncgenfunction, _decorate_async_generator),
    (inspect.iscoroutinefunction, _decorate_coroutine),
    (inspect.isgeneratorfunction, _decorate_generator),
)


def _stepwise(
    region: Region, start: Callable[..., _Steps]
) -> Callable[..., Generator[object, object, object]]:
    """Return a generator function that runs what ``start`` returns, each step in ``region``.

    What is sent and thrown goes through to it, and what it yields, raises and returns comes back,
    as if it were run itself. A generator is closed by throwing GeneratorExit; so is this.

    Args:
        region: entered for each step.
        start: makes what is run.
    """

    def in_region(*args: object, **kwargs: object) -> Generator[object, object, object]:
        with region:
            body = start(*args, **kwargs)
        step = functools.partial(body.send, None)
        while True:
            try:
                with region:
                    value = step()
            except StopIteration as stop:
                return stop.value
            try:
                sent = yield value
            except BaseException as thrown:
                step = functools.partial(body.throw, thrown)
            else:
                step = functools.partial(body.send, sent)

    return in_region


@contextmanager
def _unseen_by_the_event_loop() -> Iterator[None]:
    """Take the first step of an asynchronous generator without telling the event loop.

    The loop closes each one that it has seen when it shuts down. It sees the outer one, and
    closing that closes the inner one; both at once would be an error.
    """
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)
