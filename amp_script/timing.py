"""Timing several ways of doing one thing, so that their times can be compared.

All ways run in one process, one run of each in turn, so that whatever else the machine does falls
on all of them. What comes first changes from round to round, because a run finds the caches as the
one before it left them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["LEAST_ROUNDS", "WARM_UP", "Times", "interleaved"]

WARM_UP: Final = 4
"""Runs before the first that counts: TorchScript's executor rewrites a program in its first three,
and ``torch.compile`` compiles in its first."""

LEAST_ROUNDS: Final = 3
"""Rounds that are run however long they take, because one run alone has no spread."""


@dataclass(frozen=True)
class Times:
    """How long the runs of one way took.

    Attributes:
        seconds: one time a run, in order; at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """The shortest time, in seconds, which other load on the machine disturbs least."""
        return min(self.seconds)

    @property
    def middle(self) -> tuple[float, float]:
        """Between which times the middle half of the runs lies, in seconds."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high


def interleaved(
    ways: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warm_up: int = WARM_UP,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
    before_run: Callable[[str], None] = lambda name: None,
    after_round: Callable[[], None] = lambda: None,
    on_error: Callable[[str, Exception], None] | None = None,
) -> dict[str, Times]:
    """Time one run of each way in every round.

    Args:
        ways: what to time, by name.
        repeats: how many rounds at most.
        warm_up: runs of each way before the first round.
        seconds: for how long rounds are started; :data:`LEAST_ROUNDS` are run anyway, if
            ``repeats`` allows.
        clock: returns seconds, of the wall or of the process.
        before_run: called with the name of a way before each of its runs, outside of the time.
        after_round: called after each round, to show progress.
        on_error: called with the name and the exception of a way that fails, which then takes no
            further part. Without it the exception is raised.

    Returns:
        The times by name, without those of ways that failed.
    """
    taking_part = dict(ways)
    times: dict[str, list[float]] = {name: [] for name in ways}

    def run(name: str) -> float:
        before_run(name)
        started = clock()
        try:
            ways[name]()
        except Exception as error:
            if on_error is None:
                raise
            del taking_part[name]
            on_error(name, error)
        return clock() - started

    for name in ways:
        for _ in range(warm_up):
            if name in taking_part:
                run(name)
    began = time.monotonic()
    for number in range(repeats):
        if number >= LEAST_ROUNDS and time.monotonic() - began > seconds:
            break
        order = list(taking_part)
        for name in order if number % 2 == 0 else reversed(order):
            times[name].append(run(name))
        after_round()
    return {name: Times(tuple(times[name])) for name in taking_part}
