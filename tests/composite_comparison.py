"""Comparing a decomposition with the operator it stands for, to the bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from composite_arguments import ARGUMENTS
from torch.utils._pytree import tree_leaves, tree_map_only

from amp_script import policy
from amp_script.jit_state import AmbientState, jit_autocast_pass, shield
from amp_script.lowering import lower_graph
from amp_script.lowering.composites import Decomposition, registry

REGIONS = (torch.bfloat16, torch.float16)

# Operators whose gradient is a formula of their own, on devices where nothing can be compared here.
# On CPU autocast does not reach into them, and their gradient stays theirs.
OWN_GRADIENT = {"aten::ldexp.Tensor", "aten::mvlgamma", "aten::special_multigammaln"}


class Case:
    """Arguments for one operator, and the state to call it in.

    Attributes:
        arguments: all of the operator's arguments, in order of its schema.
        grad: whether floating-point arguments require a gradient.
        region: dtype of the region around the call; None outside every region.
    """

    def __init__(self, operator: str, r: random.Random) -> None:
        self.operator = operator
        self.arguments = ARGUMENTS[operator](r)
        written = operator.endswith("_") or "out" in operator.partition(".")[2]
        self.grad = not written and operator not in OWN_GRADIENT and r.random() < 0.5
        # An operator that CPU autocast knows runs with autocast off inside.
        known = policy.is_listed("cpu", operator)
        self.region = None if known else r.choice([*REGIONS, None])

    def fresh(self) -> tuple[Any, ...]:
        """Copies of the arguments."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            tensor = tensor.detach().clone()
            differentiable = tensor.dtype.is_floating_point and tensor.layout == torch.strided
            return tensor.requires_grad_(self.grad and differentiable)

        return tree_map_only(torch.Tensor, copy, self.arguments)

    @contextmanager
    def entered(self) -> Iterator[None]:
        with torch.autocast(
            "cpu",
            dtype=self.region or torch.bfloat16,
            enabled=self.region is not None,
            cache_enabled=False,
        ):
            yield

    def eager(self) -> Outcome:
        """What the operator itself does."""
        name, _, overload = self.operator.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, name), overload or "default")
        arguments = self.fresh()
        named = list(zip(operator._schema.arguments, arguments, strict=True))
        by_position = [value for argument, value in named if not argument.kwarg_only]
        by_name = {argument.name: value for argument, value in named if argument.kwarg_only}
        return outcome(lambda: operator(*by_position, **by_name), arguments, self.entered())

    def call(self, function: Callable[..., object]) -> Outcome:
        """What a function does in the region, its operators cast by the dispatcher."""
        arguments = self.fresh()
        # What optimizing changes, it changes below the dispatcher's casts.
        with jit_autocast_pass(False), torch.jit.optimized_execution(False):
            return outcome(lambda: function(*arguments), arguments, self.entered())

    def call_lowered(self, function: Callable[..., object]) -> Outcome:
        """What a function does with no autocast around it."""
        arguments = self.fresh()
        with shield(), jit_autocast_pass(False), torch.jit.optimized_execution(not self.grad):
            return outcome(lambda: function(*arguments), arguments, nullcontext())


class Outcome:
    """Results and gradients of one call, or the error that it raised."""

    def __init__(self, values: Sequence[object] | None, error: str = "") -> None:
        self.values = values
        self.error = error


def outcome(
    call: Callable[[], object], arguments: Sequence[object], region: AbstractContextManager[None]
) -> Outcome:
    """Run a call in a region, and its backward outside; what it wrote into its arguments counts."""
    try:
        with region:
            result = call()
    except (RuntimeError, torch.jit.Error, AssertionError, ValueError, IndexError) as error:
        return Outcome(None, str(error))
    values = [*tree_leaves(result), *tree_leaves(arguments)]
    return Outcome([*values, *_gradients(tree_leaves(result), tree_leaves(arguments))])


def _gradients(results: list[object], arguments: list[object]) -> list[object]:
    outputs = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    inputs = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outputs or not inputs:
        return []
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(x.shape, generator=generator).to(x.dtype) for x in outputs]
    try:
        return list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))
    except RuntimeError:
        return ["no gradient"]


def assert_same(got: Outcome, want: Outcome, what: object) -> None:
    """Dtypes, shapes, strides and bits, of gradients too; or an error from both."""
    if want.values is None:
        assert got.values is None, f"{what}: eager raises {want.error[:200]}"
        return
    assert got.values is not None, f"{what}: raises {got.error[-400:]}"
    if "no gradient" in want.values:  # what has none in eager mode may have one here
        assert len(got.values) >= len(want.values) - 1
        return
    assert len(got.values) == len(want.values), f"{what}: not as many results and gradients"
    for one, other in zip(got.values, want.values, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other or (one != one and other != other), f"{what}: {one}, want {other}"
            continue
        assert isinstance(one, torch.Tensor)
        assert one.dtype == other.dtype, f"{what}: {one.dtype}, want {other.dtype}"
        assert one.shape == other.shape, f"{what}: {one.shape}, want {other.shape}"
        if one.layout == torch.strided:
            if one.numel() > 0:
                assert one.stride() == other.stride(), f"{what}: strides {one.stride()}"
            assert _bits(one) == _bits(other), f"{what}: bits"
        else:
            assert torch.equal(one.to_dense(), other.to_dense()), f"{what}: bits"


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return flat.clone().view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def scripted(composite: Decomposition) -> Callable[..., object]:
    """The decomposition as a function of its own."""
    return _function(composite.graph())


def _function(graph: Any) -> Callable[..., object]:
    if len(list(graph.outputs())) > 1:
        graph.makeMultiOutputIntoTuple()
    return torch._C._create_function_from_graph("function", graph)


def lowered(operator: str, region: torch.dtype | None) -> Callable[..., object]:
    """A program that calls the operator, lowered for a region around it."""
    name, _, overload = operator.removeprefix("aten::").partition(".")
    schema = torch._C._get_schema(operator.partition(".")[0], overload)
    parameters = ", ".join(f"{each.name}: {each.type.annotation_str}" for each in schema.arguments)
    passed = ", ".join(
        f"{each.name}={each.name}" if each.kwarg_only else each.name for each in schema.arguments
    )
    source = f"def program({parameters}):\n    return torch.ops.aten.{name}({passed})\n"
    graph = registry.compiled_text(source, {"torch": torch}).graph.copy()
    if region is not None:
        with torch.autocast("cpu", dtype=region, cache_enabled=False):
            state = AmbientState.current()
        lower_graph(graph, state)
    return _function(graph)
