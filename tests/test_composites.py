"""Each decomposition against the operator it stands for, in eager mode and scripted."""

from __future__ import annotations

import random

import composite_comparison as comparison
import pytest
import torch
from composite_arguments import ARGUMENTS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from amp_script import policy
from amp_script.lowering.composites import Decomposition, decomposition, decompositions

OPERATORS = [each.operator for each in decompositions()]

pytestmark = [
    pytest.mark.filterwarnings("ignore:cov\\(\\). degrees of freedom:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:An output with one or more elements was resized:UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.c(holesky|hain_matmul) is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning"),
    pytest.mark.filterwarnings("ignore:at..nuclear_norm is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning"),
]


def _composite(operator: str) -> Decomposition:
    found = decomposition(operator)
    assert found is not None
    return found


def test_every_operator_has_arguments() -> None:
    known = [operator for operator in ARGUMENTS if torch._C._dispatch_has_kernel(operator)]
    assert sorted(known) == OPERATORS


@pytest.mark.parametrize("operator", OPERATORS)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(r=st.randoms(use_true_random=False))
def test_equals_the_operator(operator: str, r: random.Random) -> None:
    case = comparison.Case(operator, r)
    composite = _composite(operator)
    want = case.eager()
    function = comparison.scripted(composite)
    comparison.assert_same(case.call(composite.function), want, f"{operator} in eager mode")
    comparison.assert_same(case.call(function), want, f"{operator} scripted")


@pytest.mark.parametrize(
    "operator",
    [
        name
        for name in OPERATORS
        if _composite(name).reaches("cpu") and not policy.is_listed("cpu", name)
    ],
)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(r=st.randoms(use_true_random=False))
def test_lowered_program_equals_eager_autocast(operator: str, r: random.Random) -> None:
    case = comparison.Case(operator, r)
    program = comparison.lowered(operator, case.region)
    want = case.eager()
    for run in range(3):
        comparison.assert_same(case.call_lowered(program), want, f"{operator}, run {run}")


@pytest.mark.parametrize("operator", OPERATORS)
def test_has_the_operators_parameters(operator: str) -> None:
    name, _, overload = operator.partition(".")
    schema = torch._C._get_schema(name, overload)
    graph = _composite(operator).graph()
    types = [str(value.type()) for value in graph.inputs()]
    assert types == [str(argument.type) for argument in schema.arguments]
    assert len(list(graph.outputs())) == len(schema.returns)
