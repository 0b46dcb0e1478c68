"""Time of a region: made, entered and left, and entered again; ours against torch.autocast.

    python benchmarks/autocast_overhead.py [--check] [--repeats N]

Each repeat times a batch with torch's region and a batch with ours, so that whatever else the
machine does falls on both. Printed are the medians over the repeats, their ratio, and the quartiles
of the ratio within a repeat. With --check the exit status is 1 when a ratio is above its target.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import amp_script
from amp_script.timing import interleaved

BATCH = 200
"""Statements timed at once: less than half a millisecond, so that few batches are interrupted."""


@dataclass(frozen=True)
class Case:
    """A statement, and the largest ratio of ours to torch's that will do.

    Attributes:
        name: what is timed.
        statement: timed with ``region`` as a class of regions, ``made`` as one made before.
        target: None where there is none.
    """

    name: str
    statement: str
    target: float | None


CASES = (
    Case("made, entered, left", "with region('cpu'): pass", 0.65),
    Case("entered again", "with made: pass", 0.9),
    Case("made with a dtype", "with region('cpu', dtype): pass", None),
    Case("disabled", "with region('cpu', enabled=False): pass", None),
    Case("nested in another", "with made:\n    with made: pass", None),
    Case("decorated function", "decorated()", None),
)


def timers(case: Case) -> list[timeit.Timer]:
    """Return a timer for torch's regions and one for ours."""
    return [
        timeit.Timer(
            case.statement,
            globals={
                "region": region,
                "made": region("cpu"),
                "dtype": torch.float16,
                "decorated": region("cpu")(lambda: None),
            },
        )
        for region in (torch.autocast, amp_script.autocast)
    ]


def measure(case: Case, repeats: int) -> tuple[list[float], list[float]]:
    """Return the microseconds of torch's and of ours, one a repeat, taken in turns."""
    torchs, ours = timers(case)
    times = interleaved(
        {"torch": lambda: torchs.timeit(BATCH), "ours": lambda: ours.timeit(BATCH)},
        repeats=repeats,
    )
    microseconds = [[1e6 / BATCH * each for each in taken.seconds] for taken in times.values()]
    return microseconds[0], microseconds[1]


def report(repeats: int) -> list[str]:
    """Print a line a case, and return what misses its target."""
    missed = []
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(
        f"{'':22} {'torch, µs':>10} {'ours, µs':>10} {'ratio':>7} {'quartiles':>15} {'target':>7}"
    )
    for case in CASES:
        torchs, ours = measure(case, repeats)
        ratio = statistics.median(ours) / statistics.median(torchs)
        low, _, high = statistics.quantiles(
            (mine / theirs for mine, theirs in zip(ours, torchs, strict=True)), n=4
        )
        print(
            f"{case.name:22} {statistics.median(torchs):10.2f} {statistics.median(ours):10.2f} "
            f"{ratio:7.3f} {f'{low:.3f} to {high:.3f}':>15} {case.target or '':>7}"
        )
        if case.target is not None and ratio > case.target:
            missed.append(f"{case.name}: {ratio:.3f}, more than {case.target}")
    return missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a target is missed")
    parser.add_argument("--repeats", type=int, default=2000, help="default: %(default)s")
    options = parser.parse_args(arguments)
    missed = report(options.repeats)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
