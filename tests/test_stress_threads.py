"""Sixteen threads, each in regions of its own, run the same programs at once, and workers that were
forked or spawned.

CI runs for two seconds. Longer, by hand:

    AMP_SCRIPT_STRESS_SECONDS=60 pytest tests/test_stress_threads.py
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from agreement import assert_same
from torch import nn

import amp_script
from amp_script.jit_state import AmbientState

SECONDS = float(os.environ.get("AMP_SCRIPT_STRESS_SECONDS", "2"))
THREADS = 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        # Of its own, because eager autocast's cache takes one dtype's cast for another's.
        self.inner = nn.Parameter(torch.rand(16, 16) / 4)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(torch.tanh(self.first(x)).float())
        with torch.autocast("cpu", dtype=torch.float16):
            z = torch.mm(y, self.inner)
        with torch.autocast("cpu", enabled=False):
            w = torch.mm(z.float(), self.inner)
        return self.second(y).float() + w


@contextmanager
def regions(*kept: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in kept:
            stack.enter_context(amp_script.autocast("cpu", **each))
        yield


AMBIENT: list[tuple[dict[str, Any], ...]] = [
    (),
    ({"dtype": torch.bfloat16},),
    ({"dtype": torch.float16},),
    ({"enabled": False},),
    ({"dtype": torch.bfloat16, "cache_enabled": False},),
    ({"dtype": torch.float16}, {"enabled": False}),
    ({"enabled": False}, {"dtype": torch.bfloat16}),
]


def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Any]:
    def train(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(run(x).square().sum(), x)

    return train


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.linspace(-1, 1, 64).reshape(4, 16)


def test_threads_in_mixed_regions(model: Model, x: torch.Tensor) -> None:
    scripted = amp_script.script(model)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    with torch.no_grad(), regions({"dtype": torch.bfloat16}):
        of_frozen = model(x)

    jobs: list[tuple[Callable[[torch.Tensor], Any], tuple[dict[str, Any], ...], Any]] = []
    for kept in AMBIENT:
        with regions(*kept):
            jobs.append((scripted, kept, model(x).detach()))
            jobs.append((gradients(scripted), kept, gradients(model)(x)))
            want = model(x).detach()
        # Eager autocast's cache is one for all threads, so that an eager model with weights that
        # require gradients fails when threads use it with several dtypes.
        jobs.append((model, ({"enabled": False, "cache_enabled": False}, *kept), want))
        jobs.append((frozen, kept, of_frozen))

    before = AmbientState.current()
    failures: list[BaseException] = []
    done: list[int] = []
    deadline = time.monotonic() + SECONDS

    def work(number: int) -> None:
        chosen = random.Random(number)
        count = 0
        try:
            while time.monotonic() < deadline and not failures:
                run, kept, want = chosen.choice(jobs)
                with regions(*kept):
                    inside = AmbientState.current()
                    got = run(x)
                    assert AmbientState.current() == inside
                assert AmbientState.current() == before
                assert_same(_detached(got), want)
                count += 1
            done.append(count)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    assert len(done) == THREADS
    assert min(done) > 0
    assert AmbientState.current() == before


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def test_threads_that_freeze_script_and_load_at_once(x: torch.Tensor, tmp_path: Path) -> None:
    failures: list[BaseException] = []
    deadline = time.monotonic() + SECONDS

    def work(number: int) -> None:
        try:
            file = tmp_path / f"{number}.pt"
            dtype = [torch.bfloat16, torch.float16][number % 2]
            while time.monotonic() < deadline and not failures:
                own = Model().eval()
                with torch.no_grad(), regions({"dtype": dtype}):
                    want = own(x)
                frozen = amp_script.trace_and_freeze(own, x, dtype=dtype, compute="native")
                assert_same(frozen(x), want)
                amp_script.save(frozen, file)
                assert_same(amp_script.load(file, compute="native")(x), want)
                with torch.no_grad(), regions({"dtype": dtype}):
                    assert_same(amp_script.script(own)(x), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# Workers ------------------------------------------------------------------------------------------


_inherited: list[Any] = []
"""What a forked worker has from its parent; TorchScript does not pickle."""


def _work(file: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What a worker does: load, freeze, and run what its parent ran before."""
    torch.set_num_threads(1)
    loaded = amp_script.load(file, compute="native")
    torch.manual_seed(0)
    frozen = amp_script.trace_and_freeze(Model().eval(), x, compute="native")
    of_scripted = None
    with torch.no_grad(), regions({"dtype": torch.bfloat16}):
        for scripted in _inherited:
            of_scripted = scripted(x)
    return loaded(x), frozen(x), of_scripted


@pytest.mark.filterwarnings(
    # From Python 3.12 on; that a worker of a process with threads works all the same is tested.
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers(method: str, model: Model, x: torch.Tensor, tmp_path: Path) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's own threads do not live on in a forked worker
    try:
        frozen = amp_script.trace_and_freeze(model, x, compute="native")
        scripted = amp_script.script(model)
        amp_script.save(frozen, tmp_path / "model.pt")
        with torch.no_grad(), regions({"dtype": torch.bfloat16}):
            want = scripted(x)
        _inherited.append(scripted)
        with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as workers:
            found = list(workers.map(_work, [str(tmp_path / "model.pt")] * 4, [x] * 4))
    finally:
        _inherited.clear()
        torch.set_num_threads(threads)
    for of_loaded, of_frozen, of_scripted in found:
        assert_same(of_loaded, frozen(x))
        assert_same(of_frozen, frozen(x))
        if method == "fork":
            assert_same(of_scripted, want)
