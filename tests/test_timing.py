"""Interleaved timing, by a clock that the tests move."""

from __future__ import annotations

import pytest

from amp_script.timing import LEAST_ROUNDS, Times, interleaved


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.now

    def way(self, name: str, *seconds: float):
        durations = iter(seconds)

        def run() -> None:
            self.ran.append(name)
            self.now += next(durations)

        return run


def test_each_round_runs_each_way_once_and_what_comes_first_changes() -> None:
    clock = Clock()
    ways = {"a": clock.way("a", 9, 1, 2, 3), "b": clock.way("b", 9, 10, 30, 20)}
    times = interleaved(ways, repeats=3, warm_up=1, clock=clock)
    assert clock.ran == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert times == {"a": Times((1, 2, 3)), "b": Times((10, 30, 20))}
    assert times["b"].median == 20
    assert times["b"].least == 10
    assert times["b"].middle == (15, 25)


def test_what_comes_before_a_run_is_outside_of_its_time() -> None:
    clock = Clock()

    def prepare(name: str) -> None:
        clock.ran.append(f"before {name}")
        clock.now += 100

    times = interleaved(
        {"a": clock.way("a", 9, 1)}, repeats=1, warm_up=1, clock=clock, before_run=prepare
    )
    assert clock.ran == ["before a", "a"] * 2
    assert times == {"a": Times((1,))}


def test_one_run_has_no_spread() -> None:
    assert Times((2.0,)).middle == (2.0, 2.0)


def test_rounds_end_when_the_time_is_over_but_not_before_there_is_a_spread() -> None:
    rounds: list[None] = []
    times = interleaved(
        {"a": lambda: None}, repeats=99, seconds=-1, after_round=lambda: rounds.append(None)
    )
    assert len(times["a"].seconds) == len(rounds) == LEAST_ROUNDS
    assert len(interleaved({"a": lambda: None}, repeats=2, seconds=-1)["a"].seconds) == 2


@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_a_way_that_fails_takes_no_further_part(warm_up: int) -> None:
    clock = Clock()
    failed: list[tuple[str, str]] = []

    def bad() -> None:
        clock.ran.append("bad")
        if clock.ran.count("bad") == 2:
            raise ValueError("broken")

    ways = {"bad": bad, "good": clock.way("good", *[1] * 9)}
    times = interleaved(
        ways,
        repeats=3,
        warm_up=warm_up,
        clock=clock,
        on_error=lambda name, error: failed.append((name, str(error))),
    )
    assert failed == [("bad", "broken")]
    assert times == {"good": Times((1, 1, 1))}
    assert clock.ran.count("bad") == 2


def test_an_error_is_raised_where_nobody_takes_it() -> None:
    def bad() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        interleaved({"bad": bad}, repeats=1)
