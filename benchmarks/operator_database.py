"""How many of PyTorch's operators give eager autocast's result in TorchScript, in each way.

An operator differs if dtype, shape or any bit differs from eager autocast on any of three runs,
over the samples of PyTorch's own operator database; on fake tensors of a device that is absent, if
a dtype or a shape differs. What is compared, and how, is in ``tests/opdb.py``.

    python benchmarks/operator_database.py                 # CPU, two samples an operator
    python benchmarks/operator_database.py --samples 0     # CPU, all samples: about 40 minutes
    python benchmarks/operator_database.py --devices cuda xpu mps mtia --way amp_script.script
    python benchmarks/operator_database.py --quick --names --only 'linalg.*'
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import opdb
import torch
from opdb import Outcome, Region, Verdict

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
SCRIPTING = ("torch.jit.script", "amp_script.script")
TRACING = ("trace and freeze", "amp_script.trace_and_freeze")
PARTS = 8


@dataclass(frozen=True)
class Task:
    """A part of the database, compared in one way, region and dtype of inputs."""

    way: str
    device_type: str
    region_dtype: str
    input_dtype: str
    samples: int | None
    only: str
    shard: tuple[int, int]

    @property
    def row(self) -> tuple[str, str, str, str]:
        """What a row of the table is about."""
        return self.way, self.device_type, self.region_dtype, self.input_dtype


def serve(pipe: Connection) -> None:
    """Compare the parts that come through the pipe, in a process of its own.

    For each part and the number of cases to skip, sends the name of a case before comparing it, its
    outcome after, and None at the end of the part. Returns when the pipe is closed.
    """
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # fake tensors log every operator that refuses its arguments
    while True:
        try:
            task, skipped = pipe.recv()
        except EOFError:
            return
        region = Region(task.device_type, DTYPES[task.region_dtype])
        cases = opdb.cases(
            DTYPES[task.input_dtype],
            device_type=task.device_type,
            shard=task.shard,
            samples=task.samples,
            only=task.only,
        )
        for case in itertools.islice(cases, skipped, None):
            pipe.send(case.name)
            pipe.send(opdb.compare(case, opdb.RUNNERS[task.way], region))
        pipe.send(None)


class Worker:
    """A process that compares a part, and is started again where an operator ends it."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start the process."""
        self.pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def renew(self) -> None:
        """Take a new process: what TorchScript has compiled stays in the memory of the old one."""
        self.pipe.close()
        self.process.join()
        self.start()

    def run(self, task: Task) -> list[Outcome]:
        """Compare a part. An operator that ends the process differs."""
        outcomes: list[Outcome] = []
        name = ""
        self.pipe.send((task, 0))
        while True:
            try:
                message = self.pipe.recv()
            except EOFError:
                self.process.join()
                reason = f"ends the process with exit code {self.process.exitcode}"
                outcomes.append(Outcome(name, Verdict.DIFFERS, (reason,)))
                self.start()
                self.pipe.send((task, len(outcomes)))
                continue
            if message is None:
                self.renew()
                return outcomes
            if isinstance(message, str):
                name = message
            else:
                outcomes.append(message)


def tasks(options: argparse.Namespace) -> Iterator[Task]:
    """Every part of every row, row by row."""
    samples = 1 if options.quick else options.samples or None
    for way, device_type, region, inputs in itertools.product(
        options.way, options.devices, options.region, options.inputs
    ):
        if device_type != "cpu" and way in TRACING:
            continue  # a trace is made on the tensors that it will run on
        for part in range(PARTS):
            yield Task(way, device_type, region, inputs, samples, options.only, (part, PARTS))


def print_row(row: Sequence[str], outcomes: Sequence[Outcome], *, names: bool) -> None:
    """Print one line of the table, and the operators behind it on request."""
    count = Counter(outcome.verdict for outcome in outcomes)
    compared = len(outcomes) - count[Verdict.INCOMPARABLE]
    bad = count[Verdict.DIFFERS] + count[Verdict.REFUSED]
    refused = f", {count[Verdict.REFUSED]} refused" if count[Verdict.REFUSED] else ""
    print(f"| {' | '.join(row)} | {bad} of {compared}{refused} |", flush=True)
    if names:
        for outcome in outcomes:
            if outcome.verdict is not Verdict.EQUAL:
                print(f"    {outcome}", flush=True)


def main() -> None:
    """Compare, and print the table as it grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--way", nargs="+", choices=list(opdb.RUNNERS), default=list(opdb.RUNNERS))
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument(
        "--region", nargs="+", choices=["bfloat16", "float16"], default=["bfloat16", "float16"]
    )
    parser.add_argument("--inputs", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--samples", type=int, default=2, help="at most so many; 0 for all")
    parser.add_argument("--quick", action="store_true", help="one sample an operator")
    parser.add_argument("--only", default="", help="regular expression for the operators' names")
    parser.add_argument("--names", action="store_true", help="name what is not equal, and why")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()

    print(f"torch {torch.__version__}")
    print("| way | device | region | inputs | operators that differ |\n|---|---|---|---|---|")
    work = list(tasks(options))
    local = threading.local()

    def start() -> None:
        local.worker = Worker()

    def run(task: Task) -> list[Outcome]:
        return local.worker.run(task)

    with ThreadPoolExecutor(options.jobs, initializer=start) as pool:
        done = zip(work, pool.map(run, work), strict=True)
        for row, parts in itertools.groupby(done, key=lambda pair: pair[0].row):
            outcomes = [outcome for _, part in parts for outcome in part]
            print_row(row, outcomes, names=options.names)


if __name__ == "__main__":
    main()
