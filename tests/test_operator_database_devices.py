"""Every operator of PyTorch's database on devices that are absent: dtypes, on fake tensors.

One sample an operator here; ``benchmarks/operator_database.py --samples 0 --devices cuda`` takes
all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import opdb
import pytest
import torch
from opdb import Region, Verdict
from versions import is_built_for_a_gpu_that_is_not_here

PARTS = 4
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCRIPT = opdb.RUNNERS["amp_script.script"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Fake tensors log every operator that refuses its arguments."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("device_type", ["cuda", "xpu", "mps", "mtia"])
@pytest.mark.parametrize("part", range(PARTS))
def test_dtypes_and_shapes_are_eager_autocast_s(part: int, device_type: str) -> None:
    failures = []
    left_out = set()
    if device_type == "cuda" and is_built_for_a_gpu_that_is_not_here:
        left_out.add("__getitem__")  # torch.jit.script too makes an index on the GPU, and crashes
    region = Region(device_type, torch.float16)
    for case in opdb.cases(torch.float32, device_type=device_type, shard=(part, PARTS), samples=1):
        if case.name in left_out:
            continue
        for input_dtype in INPUT_DTYPES:
            outcome = opdb.compare(case.cast(input_dtype), SCRIPT, region)
            if outcome.verdict in (Verdict.DIFFERS, Verdict.REFUSED):
                failures.append(f"{input_dtype} inputs: {outcome}")
    assert not failures, "\n".join(failures)
