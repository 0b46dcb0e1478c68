"""The pass that puts decompositions in the place of operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from amp_script.jit_state import jit_autocast_pass
from amp_script.lowering.composites import expand_composites, registry


def _graph(source: str) -> Any:
    graph = registry.compiled_text(source, {"torch": torch}).graph.copy()
    torch._C._jit_pass_inline(graph)
    return graph


def _kinds(graph: Any) -> list[str]:
    return [node.kind() for node in registry.nodes_of(graph)]


def _always(*device_types: str) -> Callable[[Any], tuple[str, ...]]:
    return lambda node: device_types


TENSORDOT = """
def program(a: Tensor, b: Tensor) -> Tensor:
    return torch.ops.aten.tensordot(a, b, [1], [0])
"""


def test_an_operator_outside_every_region_stays() -> None:
    graph = _graph(TENSORDOT)
    before = str(graph)
    expand_composites(graph, _always())
    assert str(graph) == before


def test_an_operator_that_autocast_does_not_reach_stays() -> None:
    graph = _graph(TENSORDOT)
    expand_composites(graph, _always("cuda"))  # autocast on CUDA knows tensordot itself
    assert _kinds(graph).count("aten::tensordot") == 1
    assert "aten::mm" not in _kinds(graph)


def test_parts_run_on_the_regions_device_and_the_operator_elsewhere() -> None:
    graph = _graph(TENSORDOT)
    expand_composites(graph, _always("cpu"))
    (choice,) = (node for node in graph.nodes() if node.kind() == "prim::If")
    parts, whole = choice.blocks()
    assert "aten::mm" in [node.kind() for node in registry.nodes_of(parts)]
    assert [node.kind() for node in whole.nodes()] == ["aten::tensordot"]
    graph.lint()


def test_an_operator_known_on_one_device_is_kept_whole_there() -> None:
    graph = _graph(
        """
def program(x: Tensor, w: Tensor) -> Tensor:
    return torch.conv1d(x, w, None, [1], "same", [1], 1)
"""
    )
    expand_composites(graph, _always("cpu", "cuda"))
    (choice,) = (node for node in graph.nodes() if node.kind() == "prim::If")
    parts, whole = choice.blocks()
    assert "aten::convolution" in [node.kind() for node in registry.nodes_of(parts)]
    assert [node.kind() for node in whole.nodes()] == ["aten::conv1d"]
    function = torch._C._create_function_from_graph("program", graph)
    x, w = torch.rand(1, 2, 5), torch.rand(3, 2, 3)
    assert torch.equal(function(x, w), torch.nn.functional.conv1d(x, w, padding="same"))


def test_composites_in_blocks_and_in_composites_are_taken_apart() -> None:
    graph = _graph(
        """
def program(a: Tensor, n: int) -> Tensor:
    for i in range(n):
        if i > 1:
            a = torch.corrcoef(a)
    return a
"""
    )
    expand_composites(graph, _always("cpu"))
    kinds = _kinds(graph)
    assert "aten::mm" in kinds
    # Those that are left are beside their parts, for tensors on other devices.
    assert kinds.count("aten::corrcoef") <= 2
    graph.lint()


def test_the_predicate_is_asked_for_each_composite() -> None:
    graph = _graph(
        """
def program(a: Tensor) -> Tensor:
    b = torch.cov(a)
    return b + torch.corrcoef(a)
"""
    )
    asked: list[str] = []

    def active(node: Any) -> list[str]:
        asked.append(node.kind())
        return ["cpu"] if node.kind() == "aten::cov" else []

    expand_composites(graph, active)
    assert asked == ["aten::cov", "aten::corrcoef"]
    assert "aten::corrcoef" in _kinds(graph)


def test_the_parts_have_the_users_source_line() -> None:
    def program(a: torch.Tensor) -> torch.Tensor:
        return torch.cov(a)

    graph: Any = torch.jit.script(program).graph.copy()
    (cov,) = (node for node in graph.nodes() if node.kind() == "aten::cov")
    line = cov.sourceRange()
    assert __file__ in line
    expand_composites(graph, _always("cpu"))
    (product,) = (node for node in registry.nodes_of(graph) if node.kind() == "aten::mm")
    assert product.sourceRange() == line


def test_constants_choose_the_branch_when_lowering() -> None:
    graph = _graph(
        """
def program(x: Tensor, amount: int) -> Tensor:
    return torch.ops.aten.pad(x, [amount, 1], "reflect", None)
"""
    )
    expand_composites(graph, _always("cpu"))
    kinds = _kinds(graph)
    assert "aten::reflection_pad1d" in kinds
    assert "aten::replication_pad1d" not in kinds
    assert "aten::constant_pad_nd" not in kinds


def test_layers_of_a_recurrent_network_are_written_out() -> None:
    graph = _graph(
        """
def program(x: Tensor, h: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    weights = [a, b, c, d]
    return torch.gru(x, h, weights, False, 2, 0.0, False, False, False)[0]
"""
    )
    expand_composites(graph, _always("cpu"))
    kinds = _kinds(graph)
    # Over time, one loop a layer; over layers, none.
    assert kinds.count("prim::Loop") == 2
    assert kinds.count("aten::linear") == 4
    assert "aten::_thnn_fused_gru_cell" not in kinds


@pytest.mark.parametrize(
    "equation", ["ij,jk->ik", "bij,bjk->bik", "bhid,bhjd->bhij", "jk,ik->ij", "ij,ij->", "i,i"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_einsum_of_two_with_a_constant_equation(equation: str, dtype: torch.dtype) -> None:
    composite = registry.decomposition("aten::einsum")
    assert composite is not None
    special = composite.special([equation, registry.VARIES, None])
    assert special is not None
    operands = equation.partition("->")[0].split(",")
    for sizes in ({}, {"i": 1}, {"j": 1}, {"i": 0}, {"k": 1, "i": 1}):
        tensors = [torch.rand([sizes.get(c, 2 + ord(c) % 3) for c in text]) for text in operands]
        with jit_autocast_pass(False), torch.autocast("cpu", dtype=dtype):
            want = torch.ops.aten.einsum(equation, tensors)
            got = special(equation, tensors, None)
        assert got.dtype == want.dtype
        assert got.stride() == want.stride() or got.numel() == 0
        assert torch.equal(got, want)
    mismatched = [torch.rand([2 + index] * len(text)) for index, text in enumerate(operands)]
    with pytest.raises(torch.jit.Error):
        special(equation, mismatched, None)


def test_a_decomposition_is_registered_once() -> None:
    with pytest.raises(AssertionError, match="decomposed twice"):
        registry.decomposes("aten::cov")(lambda x: x)
