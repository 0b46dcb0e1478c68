"""The upcast pass: rounded values, float32 kernels.

Each operator of the chosen kinds that works on a reduced dtype takes its operands, which are
rounded already, in float32, and its result is rounded to the reduced dtype. Every value keeps the
dtype it had, so nothing outside the operator sees a difference but its speed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from amp_script.lowering._graph import (
    Block,
    Editor,
    Graph,
    Node,
    Value,
    blocks_of,
    constant,
    dtype_code,
    is_constant,
    is_none,
    is_optional_tensor,
    is_tensor,
    is_tensor_list,
    nodes_of,
)

from .dimensions import is_in_place
from .dtypes import Dtypes, cast_dtype, infer, keeps_dtype_as_function
from .operators import KINDS
from .processor import Kind
from .templates import insert

__all__ = ["REDUCED", "upcast"]

REDUCED: Final = (torch.bfloat16, torch.float16)
"""Dtypes that have fewer bits than float32."""

_WIDEN = """
def widen(x: Tensor) -> Tensor:
    return x.to(torch.float32)
"""

_WIDEN_FLOATING = """
def widen_floating(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.is_floating_point() else x
"""

_WIDEN_OPTIONAL = """
def widen_optional(x: Optional[Tensor]) -> Optional[Tensor]:
    if x is not None:
        x = x.to(torch.float32) if x.is_floating_point() else x
    return x
"""

_WIDEN_LIST = """
def widen_list(xs: List[Tensor]) -> List[Tensor]:
    return [x.to(torch.float32) if x.is_floating_point() else x for x in xs]
"""

_ROUND = """
def round(x: Tensor, dtype: int) -> Tensor:
    return x.to(dtype)
"""


def upcast(
    graph: Graph,
    inputs: Mapping[str, torch.dtype],
    kinds: Mapping[torch.dtype, Collection[Kind]],
) -> set[str]:
    """Run operators of the given kinds in float32 where they work on a reduced dtype.

    Args:
        graph: a frozen graph, changed in place; it must not have run yet. Casts of constants are
            left in it, for :mod:`amp_script.compute.constants` to fold.
        inputs: dtypes of tensor inputs by their names.
        kinds: kinds of operator to change, by the dtype that they work on.

    Returns:
        Names of the float32 results of the operators that were changed, before rounding.
    """
    torch._C._jit_pass_inline(graph)
    torch._C._jit_pass_constant_propagation(graph)
    _remove_mutation(graph, inputs)
    torch._C._jit_pass_cse(graph)
    _take_apart_constant_lists(graph)
    changed = _Upcast(graph, infer(graph, inputs), kinds).run()
    torch._C._jit_pass_dce(graph)
    torch._C._jit_pass_lint(graph)
    return changed


def _remove_mutation(graph: Graph, inputs: Mapping[str, torch.dtype]) -> None:
    """Write in-place operators as functions, if these give the same dtypes.

    A value that is written to cannot share its float32 form. Torch's pass takes all of a graph or
    none, and minds no dtypes.
    """
    in_place = list(filter(is_in_place, nodes_of(graph)))
    dtypes = infer(graph, inputs) if in_place else None
    if dtypes is None or all(keeps_dtype_as_function(node, dtypes) for node in in_place):
        torch._C._jit_pass_remove_mutation(graph)


def _take_apart_constant_lists(graph: Graph) -> None:
    """Write constant lists of tensors, such as an LSTM's weights, as lists of constants."""
    editor = Editor(graph)
    for node in nodes_of(graph):
        if node.kind() == "prim::Constant" and is_tensor_list(node.output()):
            parts = [editor.constant_before(node, part) for part in constant(node.output())]
            made = editor.node_before(node, "prim::ListConstruct", *parts)
            made.output().setType(node.output().type())
            node.output().replaceAllUsesWith(made.output())


class _Upcast:
    """One run of the pass over one graph."""

    def __init__(self, graph: Graph, dtypes: Dtypes, kinds: Mapping[torch.dtype, Collection[Kind]]):
        self._editor = Editor(graph)
        self._dtypes = dtypes
        self._kinds = kinds
        self._written = _written(graph)
        self._changed: set[str] = set()

    def run(self) -> set[str]:
        self._in_block(self._editor.graph.block(), {})
        return self._changed

    def _in_block(self, block: Block, outer: Mapping[str, Value]) -> None:
        """Change the nodes of a block; ``wide`` holds float32 forms that dominate the node."""
        wide = dict(outer)
        nodes = list(block.nodes())
        for node, following in zip(nodes, [*nodes, block.returnNode()][1:], strict=True):
            for inner in node.blocks():
                self._in_block(inner, wide)
            if self._is_changed(node):
                self._change(node, following, wide)
            else:
                self._share(node, wide)

    def _is_changed(self, node: Node) -> bool:
        kind = KINDS.get(node.kind())
        if kind is None or "!" in node.schema():
            return False
        dtype = self._dtypes.of_operands(node)
        return dtype is not None and kind in self._kinds.get(dtype, ())

    def _change(self, node: Node, following: Node, wide: dict[str, Value]) -> None:
        dtype = self._dtypes.of_operands(node)
        assert dtype is not None
        for index, value in enumerate(list(node.inputs())):
            widened = self._widened(node, value, dtype, wide)
            if widened is not None:
                node.replaceInput(index, widened)
        code = self._editor.constant_before(node, dtype_code(dtype))
        for output in list(node.outputs()):
            if is_tensor(output) and output.uses():
                self._round(output, following, code, dtype)

    def _round(self, output: Value, following: Node, code: Value, dtype: torch.dtype) -> None:
        rounded = insert(self._editor, following, _ROUND, output, code)
        rounded.node().copyMetadata(output.node())
        output.replaceAllUsesAfterNodeWith(rounded.node(), rounded)
        self._changed.add(output.debugName())
        self._dtypes.set(output, torch.float32)
        self._dtypes.set(rounded, dtype)
        if output.debugName() in self._written:
            self._written.add(rounded.debugName())

    def _widened(
        self, node: Node, value: Value, dtype: torch.dtype, wide: dict[str, Value]
    ) -> Value | None:
        """The value as the float32 kernel takes it; ``None`` where it stays."""
        known = self._dtypes.of(value)
        if known is not None and known != dtype:
            return None
        if is_tensor(value) and known is not None:
            return self._wide(node, value, wide)
        if is_tensor(value):
            return insert(self._editor, node, _WIDEN_FLOATING, value)
        if is_optional_tensor(value) and not is_none(value):
            return insert(self._editor, node, _WIDEN_OPTIONAL, value)
        if not is_tensor_list(value):
            return None
        if value.node().kind() != "prim::ListConstruct" or self._is_written(value):
            return insert(self._editor, node, _WIDEN_LIST, value)
        parts = [self._widened(node, part, dtype, wide) or part for part in value.node().inputs()]
        made = self._editor.node_before(node, "prim::ListConstruct", *parts)
        made.output().setType(value.type())
        return made.output()

    def _wide(self, node: Node, value: Value, wide: dict[str, Value]) -> Value:
        name = value.debugName()
        if name in wide:
            return wide[name]
        widened = insert(self._editor, node, _WIDEN, value)
        self._dtypes.set(widened, torch.float32)
        if not self._is_written(value):
            wide[name] = widened
        return widened

    def _share(self, node: Node, wide: dict[str, Value]) -> None:
        """Let operators after a cast to float32 that the graph has already use its result."""
        if cast_dtype(node) is not torch.float32 or not _is_plain_cast(node):
            return
        value = node.inputsAt(0)
        if self._dtypes.of(value) not in REDUCED:
            return
        if self._is_written(value) or self._is_written(node.output()):
            return
        if value.debugName() in wide:
            node.output().replaceAllUsesWith(wide[value.debugName()])
        else:
            wide[value.debugName()] = node.output()

    def _is_written(self, value: Value) -> bool:
        return value.debugName() in self._written


def _written(graph: Graph) -> set[str]:
    """Names of the values that some operator changes in place, themselves or through an alias."""
    aliases: Any = graph.alias_db()
    return {value.debugName() for value in _values(graph) if aliases.has_writers(value)}


def _values(graph: Graph) -> Iterator[Value]:
    for block in blocks_of(graph):
        yield from block.inputs()
        for node in block.nodes():
            yield from node.outputs()


def _is_plain_cast(node: Node) -> bool:
    """Whether a cast only casts: it need not copy, and keeps the memory format."""
    rest: Sequence[Value] = list(node.inputs())[2:]
    return all(is_none(value) or (is_constant(value) and not constant(value)) for value in rest)
