"""The operator-database harness: what it calls equal, how it writes programs, what it covers."""

from __future__ import annotations

import math

import opdb
import pytest
import torch
from opdb import Case, Failure, Outcome, Region, Runner, Sample, Verdict

from amp_script import policy

BFLOAT16 = Region("cpu", torch.bfloat16)


@pytest.mark.parametrize(
    ("expected", "got", "how"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), ""),
        (torch.tensor([math.nan]), -torch.tensor([math.nan]), ""),
        (torch.tensor([0.0]), torch.tensor([-0.0]), "bits"),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), "bits"),
        (torch.ones(2), torch.ones(2).bfloat16(), "dtype bfloat16 instead of float32"),
        (torch.ones(2), torch.ones(2, 1), "shape"),
        ((torch.ones(2), 3), [torch.ones(2), 3], ""),
        ((torch.ones(2), 3), (torch.ones(2), 3.0), "value"),
        ((torch.ones(2), 3), (torch.ones(2), 4), "value"),
        ((torch.ones(2), 3), (torch.ones(2),), "structure"),
        (torch.ones(2), 1.0, "structure"),
        (math.nan, math.nan, ""),
        (torch.tensor([1j, complex(0, math.nan)]), torch.tensor([1j, complex(0, math.nan)]), ""),
        (torch.tensor([1j]), torch.tensor([-1j]), "bits"),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), ""),
        (torch.eye(2).to_sparse(), torch.eye(2), "shape"),
        (torch.ones(2), Failure(ValueError("no")), "raises"),
    ],
)
def test_what_counts_as_a_difference(expected: object, got: object, how: str) -> None:
    assert opdb.difference(expected, got) == how


def test_values_as_source() -> None:
    tensors: list[torch.Tensor] = []
    value = [None, True, 2, math.inf, 1 + 2j, "a", (1,), (-0.5, torch.ones(2)), torch.float32]
    source = opdb.literal(value, tensors)
    assert source == (
        "[None, True, 2, float(\"inf\"), complex(1.0, 2.0), 'a', (1,), (-0.5, t0), torch.float32]"
    )
    assert len(tensors) == 1
    with pytest.raises(opdb.InexpressibleError, match="an argument of type set"):
        opdb.literal({1}, tensors)


def test_a_program_runs_in_its_region() -> None:
    sample = Sample(torch.mm, (torch.ones(2, 2), torch.ones(2, 2)), "torch.mm(t0, t1)")
    assert sample.program()(*sample.inputs()).dtype == torch.float32
    assert sample.program(BFLOAT16)(*sample.inputs()).dtype == torch.bfloat16
    traced = Sample(torch.mm, sample.tensors)
    assert opdb.scripted(traced.program())(*traced.inputs()).dtype == torch.float32


def test_inputs_are_copies_with_their_strides() -> None:
    sample = Sample(torch.neg, (torch.ones(1, 3).expand(2, 3), torch.ones(2, 3).t()))
    first, second = sample.inputs()
    assert (first.stride(), second.stride()) == ((0, 1), (1, 3))
    first.zero_()
    assert sample.tensors[0].all()
    assert [t.dtype for t in sample.cast(torch.float16).tensors] == [torch.float16] * 2


def _in_eager_mode(sample: Sample, region: Region | None) -> opdb.Program:
    def program(*tensors: torch.Tensor) -> object:
        assert region is not None
        with region.entered():
            return sample.call(*tensors)

    return program


EAGER = Runner("eager", _in_eager_mode)


def test_the_database_is_covered_and_eager_mode_repeats_itself() -> None:
    least = {torch.float32: 644, torch.bfloat16: 522}
    equal = dict.fromkeys(least, 0)
    for case in opdb.cases(torch.float32, samples=1):
        for dtype in least:
            outcome = opdb.compare(case.cast(dtype), EAGER, BFLOAT16)
            assert outcome.verdict is not Verdict.DIFFERS, outcome
            equal[dtype] += outcome.verdict is Verdict.EQUAL
    assert all(equal[dtype] >= least[dtype] for dtype in least), equal


def _compare(only: str, way: str, dtype: torch.dtype = torch.float32) -> dict[str, Outcome]:
    compared = [
        opdb.compare(case, opdb.RUNNERS[way], BFLOAT16)
        for case in opdb.cases(dtype, samples=1, only=only)
    ]
    return {outcome.case: outcome for outcome in compared}


def test_what_is_known_of_scripting_with_torch_alone() -> None:
    found = _compare("(add|mv|cov|mm|linalg.multi_dot)/", "torch.jit.script")
    verdicts = {name: outcome.verdict for name, outcome in found.items()}
    assert verdicts == {
        "add": Verdict.EQUAL,
        "cov": Verdict.DIFFERS,
        "linalg.multi_dot": Verdict.DIFFERS,
        "mm": Verdict.EQUAL,
        "mv": Verdict.DIFFERS,
    }
    (reason,) = found["mv"].reasons
    assert reason == "run 1: dtype bfloat16 instead of float32 in `torch.mv(t0, t1)`"


def test_what_is_known_of_tracing_with_torch_alone() -> None:
    found = _compare("(add|mm|cov|item)/", "trace and freeze")
    verdicts = {name: outcome.verdict for name, outcome in found.items()}
    assert verdicts == {
        "add": Verdict.EQUAL,
        "cov": Verdict.DIFFERS,
        "item": Verdict.INCOMPARABLE,
        "mm": Verdict.EQUAL,
    }


def test_a_refusal_is_told_from_a_mistake() -> None:
    def refuse(sample: Sample, region: Region | None) -> opdb.Program:
        if region is not None:
            raise KeyError("refused")
        return sample.program()

    (case,) = opdb.cases(torch.float32, samples=1, only="neg/")
    refusing = Runner("refusing", refuse, refusals=(KeyError,))
    mistaken = Runner("mistaken", refuse)
    assert opdb.compare(case, refusing, BFLOAT16).verdict is Verdict.REFUSED
    assert opdb.compare(case, mistaken, BFLOAT16).verdict is Verdict.DIFFERS


def test_what_cannot_be_compared_says_why() -> None:
    reasons = {
        name: outcome.reasons[0]
        for name, outcome in _compare("(empty|gcd)/", "torch.jit.script").items()
    }
    assert reasons == {
        "empty": "its result is uninitialised memory",
        "gcd": "it takes no float32 tensors on the CPU",
    }
    lonely = Case("lonely", "", unusable="it has no samples")
    assert opdb.compare(lonely, EAGER, BFLOAT16).reasons == ("it has no samples",)


def test_dtypes_on_a_device_that_is_absent() -> None:
    region = Region("cuda", torch.float16)
    (case,) = opdb.cases(torch.float32, device_type="cuda", samples=1, only="mm/")
    assert opdb.compare(case, EAGER, region).verdict is Verdict.EQUAL
    (case,) = opdb.cases(torch.float32, device_type="cuda", samples=1, only="zeros/")
    assert 'device="cuda"' in case.samples[0].expression
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize("operator", sorted(opdb.NOT_IMITATED))
def test_what_is_not_imitated_calls_what_autocast_handles(operator: str) -> None:
    region = Region("cuda", torch.float16)
    (case, *_) = opdb.cases(torch.float32, device_type="cuda", samples=2, only=f"{operator}/")
    assert opdb.compare(case, EAGER, region).verdict is Verdict.INCOMPARABLE
    (case, *_) = opdb.cases(torch.float32, samples=2, only=f"{operator}/")
    handled = {name.partition(".")[0] for name in policy.listed_operators("cuda")}
    called: set[str] = set()
    for sample in case.samples:
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            sample.call(*sample.inputs())
        called |= {event.name for event in profile.function_events}
    assert called & handled


def test_parts_make_up_the_whole() -> None:
    names = [case.name for case in opdb.cases(torch.float32, samples=0, only="a")]
    parts = [
        case.name
        for part in range(3)
        for case in opdb.cases(torch.float32, samples=0, only="a", shard=(part, 3))
    ]
    assert sorted(parts) == sorted(names)
