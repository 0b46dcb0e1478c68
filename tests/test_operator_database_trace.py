"""Every operator of PyTorch's database, traced and frozen, against eager autocast.

Two samples an operator here; ``benchmarks/operator_database.py --samples 0`` takes all of them.
"""

from __future__ import annotations

import itertools

import opdb
import pytest
import torch
from opdb import Region, Verdict

PARTS = 8
REGION_DTYPES = (torch.bfloat16, torch.float16)
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRACE = opdb.RUNNERS["amp_script.trace_and_freeze"]

REFUSED_ALOUD = {"as_strided/partial_views"}
"""Reads its input's storage outside the input, of which tracing copies the input alone."""


@pytest.mark.parametrize("part", range(PARTS))
def test_dtype_shape_and_bits_are_eager_autocast_s(part: int) -> None:
    failures = []
    for case in opdb.cases(torch.float32, shard=(part, PARTS), samples=2):
        for region_dtype, input_dtype in itertools.product(REGION_DTYPES, INPUT_DTYPES):
            outcome = opdb.compare(case.cast(input_dtype), TRACE, Region("cpu", region_dtype))
            if case.name in REFUSED_ALOUD and "building raises" in str(outcome):
                continue
            if outcome.verdict in (Verdict.DIFFERS, Verdict.REFUSED):
                failures.append(f"{region_dtype} region, {input_dtype} inputs: {outcome}")
    assert not failures, "\n".join(failures)
