"""Which dtype each value of a frozen graph has, as far as the graph tells.

Freezing drops the dtypes that tracing saw, but constants have theirs, casts name theirs, and most
operators keep or promote what they are given. A value whose dtype does not follow is left out: no
plan touches what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, TypeAlias

import torch

from amp_script.lowering._graph import (
    Block,
    Graph,
    Node,
    Value,
    blocks_of,
    constant,
    dtypes_by_code,
    is_constant,
    is_none,
    is_optional_tensor,
    is_tensor,
    is_tensor_list,
    nodes_of,
    parsed_schema,
)

from .dimensions import Dimensions, promoted
from .operators import AGREEING, ALIKE, KEEP_DTYPE, KINDS, MADE, PROMOTE
from .processor import Kind

__all__ = [
    "Dtypes",
    "Rule",
    "cast_dtype",
    "infer",
    "input_name",
    "keeps_dtype_as_function",
    "promotes_as_number",
    "results",
]


class Dtypes:
    """Dtypes by value; of a list, the dtype that all its tensors have.

    Args:
        dimensions: tells which tensors have some.
        changing: names of lists that are given other tensors, so that they have no dtype.
    """

    def __init__(self, dimensions: Dimensions, changing: Collection[str] = ()) -> None:
        self.dimensions = dimensions
        self._changing = changing
        self._by_name: dict[str, torch.dtype] = {}

    def of(self, value: Value) -> torch.dtype | None:
        """The dtype of a tensor or of every tensor in a list; ``None`` where it is not known."""
        return self._by_name.get(value.debugName())

    def set(self, value: Value, dtype: torch.dtype | None) -> None:
        """Record a dtype, or that it is not known."""
        if dtype is None or self.is_changing(value):
            self._by_name.pop(value.debugName(), None)
        else:
            self._by_name[value.debugName()] = dtype

    def is_changing(self, value: Value) -> bool:
        """Whether a value is a list that is given other tensors."""
        return value.debugName() in self._changing

    def of_operands(self, node: Node) -> torch.dtype | None:
        """The floating-point dtype that the tensors of an operator in :data:`KINDS` share; ``None``
        where they have several, or one whose dtype is not known may have another.
        """
        operands = [value for value in node.inputs() if _holds_tensors(value)]
        found = {dtype for value in operands if (dtype := self.of(value))}
        found = {dtype for dtype in found if dtype.is_floating_point}
        return found.pop() if len(found) == 1 and self._all_follow(node, operands) else None

    def _all_follow(self, node: Node, operands: Sequence[Value]) -> bool:
        """Whether the dtypes that are known settle those of the other operands."""
        kind = node.kind()
        if kind in AGREEING:
            known = [self.of(operands[place]) for place in AGREEING[kind] if place < len(operands)]
            return any(dtype is not None and dtype.is_floating_point for dtype in known)
        if KINDS.get(kind) is Kind.RECURRENT and (schema := parsed_schema(node.schema())):
            # An input is multiplied by its weights, and so is a state, but for an LSTM's cells.
            names = _WEIGHTS | {"hx"} if "lstm" in kind else _WEIGHTS
            given = zip(schema.arguments, node.inputs(), strict=True)
            operands = [value for argument, value in given if argument.name in names] or operands
        return all(self.of(value) is not None for value in operands)


_WEIGHTS: Final = frozenset({"params", "w_ih", "w_hh"})
"""What recurrent operators call their weights."""


def _holds_tensors(value: Value) -> bool:
    is_optional = is_optional_tensor(value) and not is_none(value)
    return is_tensor(value) or is_optional or is_tensor_list(value)


Rule: TypeAlias = "Callable[[Node, Dtypes], Sequence[torch.dtype | None]]"
"""Dtypes of a node's results; none at all where the rule does not say."""


def infer(
    graph: Graph,
    inputs: Mapping[str, torch.dtype],
    rule: Rule | None = None,
    ranks: Mapping[int, int] | None = None,
) -> Dtypes:
    """Work out dtypes from the constants, the casts and the dtypes of the inputs.

    Args:
        graph: a frozen graph, with its calls inlined.
        inputs: dtypes of tensor inputs by their names.
        rule: what tells the dtypes of a node's results; :func:`results` if not given.
        ranks: by the numbers of values how many dimensions they have, where that is known.
    """
    dtypes = Dtypes(Dimensions(graph, ranks or {}), _changing_lists(graph))
    for value in graph.inputs():
        dtypes.set(value, inputs.get(input_name(value)))
    _infer_block(graph.block(), dtypes, rule or results)
    return dtypes


def input_name(value: Value) -> str:
    """The name that a graph's input has in the method's schema: without the graph's suffix."""
    return str(value.debugName().split(".")[0])


def _changing_lists(graph: Graph) -> set[str]:
    """Names of the lists of tensors that some operator changes."""
    nodes = nodes_of(graph)
    if not any("!" in node.schema() and is_tensor_list(node.inputsAt(0)) for node in nodes):
        return set()
    aliases: Any = graph.alias_db()
    values = [value for block in blocks_of(graph) for value in block.inputs()]
    values += [value for node in nodes for value in node.outputs()]
    lists = filter(is_tensor_list, values)
    return {value.debugName() for value in lists if aliases.has_writers(value)}


def _infer_block(block: Block, dtypes: Dtypes, rule: Rule) -> None:
    for node in block.nodes():
        outputs = list(node.outputs())
        if node.kind() == "prim::If":
            _infer_branches(node, outputs, dtypes, rule)
        elif node.kind() == "prim::Loop":
            _infer_loop(node, outputs, dtypes, rule)
        else:
            known = (*rule(node, dtypes), *repeat(None, len(outputs)))
            for value, dtype in zip(outputs, known, strict=False):
                dtypes.set(value, dtype)


def _infer_branches(node: Node, outputs: Sequence[Value], dtypes: Dtypes, rule: Rule) -> None:
    branches = list(node.blocks())
    for branch in branches:
        _infer_block(branch, dtypes, rule)
    for value, *ends in zip(outputs, *(branch.outputs() for branch in branches), strict=True):
        dtypes.set(value, _shared(dtypes.of(end) for end in ends if not _is_never_used(end)))


def _is_never_used(value: Value) -> bool:
    """Whether the value stands where a branch ends in an exception."""
    return bool(value.node().kind() == "prim::Uninitialized")


def _infer_loop(node: Node, outputs: Sequence[Value], dtypes: Dtypes, rule: Rule) -> None:
    (body,) = node.blocks()
    carried = list(body.inputs())[1:]
    for value, start in zip(carried, list(node.inputs())[2:], strict=True):
        dtypes.set(value, dtypes.of(start))
    settled = False
    while not settled:
        _infer_block(body, dtypes, rule)
        settled = True
        for value, result in zip(carried, list(body.outputs())[1:], strict=True):
            if dtypes.of(value) not in (None, dtypes.of(result)):
                dtypes.set(value, None)
                settled = False
    for value, inside in zip(outputs, carried, strict=True):
        dtypes.set(value, dtypes.of(inside))


def results(node: Node, dtypes: Dtypes) -> Sequence[torch.dtype | None]:
    """Dtypes of a node's results; none at all where they do not follow."""
    kind, count = node.kind(), node.outputsSize()
    if kind == "prim::Constant":
        return [_of_constant(node.output())]
    if kind in ("prim::ListConstruct", "prim::ListUnpack"):
        return [_shared(dtypes.of(value) for value in node.inputs())] * count
    if kind == "aten::__getitem__":
        return [dtypes.of(node.inputsAt(0))]
    cast = cast_dtype(node)
    if cast is not None:
        return [cast]
    if kind == "aten::type_as" or node.schema().startswith("aten::to.other("):
        return [dtypes.of(node.inputsAt(1))]
    named = _named_dtype(node)
    if named is not None:
        is_made = kind in MADE and _is_number(named)
        return [dtypes_by_code()[constant(named)]] if is_made else []
    if "!" in node.schema():
        return _of_written(node, dtypes)
    return _of_operator(kind, node, dtypes)


def _of_written(node: Node, dtypes: Dtypes) -> Sequence[torch.dtype | None]:
    """What an operator writes to and returns has the dtype that it had."""
    schema = parsed_schema(node.schema())
    assert schema is not None
    written = {
        name: dtypes.of(value)
        for argument, value in zip(schema.arguments, node.inputs(), strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
        for name in argument.alias_info.before_set
    }
    sets = [result.alias_info.before_set if result.alias_info else () for result in schema.returns]
    return [next((written.get(name) for name in names), None) for names in sets]


def keeps_dtype_as_function(node: Node, dtypes: Dtypes) -> bool:
    """Whether the function that an in-place operator is named after gives the same dtype: with a
    float32 tensor, ``add_`` leaves bfloat16 what it is, and ``add`` makes float32 of it.
    """
    dtype = dtypes.of(node.inputsAt(0))
    found = _of_operator(node.kind().removesuffix("_"), node, dtypes)
    return dtype is not None and list(found) == [dtype]


def promotes_as_number(node: Node, dtypes: Dtypes) -> bool:
    """Whether an operator's second argument, a constant without dimensions, surely gives the result
    the dtype that a number would.
    """
    first, scalar = node.inputsAt(0), constant(node.inputsAt(1))
    dtype, has = dtypes.of(first), dtypes.dimensions.has(first)
    if dtype is None or not dtype.is_floating_point or scalar.is_complex():
        return False  # a number makes an integer what the default dtype is
    return bool(has) or torch.promote_types(dtype, scalar.dtype) == dtype


def _of_operator(kind: str, node: Node, dtypes: Dtypes) -> Sequence[torch.dtype | None]:
    """Dtypes of the results that the tables have for a kind of operator."""
    if kind in KINDS:
        return [dtypes.of_operands(node)] * node.outputsSize()
    if kind in KEEP_DTYPE:
        first = dtypes.of(next(node.inputs()))
        return [first if first is not None and first.is_floating_point else None]
    if kind in ALIKE:
        taken = [value for value in node.inputs() if is_tensor(value) or is_optional_tensor(value)]
        return [_shared(map(dtypes.of, taken))]
    if kind in PROMOTE and not any(map(dtypes.is_changing, node.inputs())):
        return [promoted(node, dtypes.of, dtypes.dimensions)]
    return []


def cast_dtype(node: Node) -> torch.dtype | None:
    """The dtype that a node casts its first argument to; ``None`` if it is no such node."""
    if node.kind() != "aten::to" or not node.schema().startswith(("aten::to.dtype(", _TO_LAYOUT)):
        return None
    code = node.inputsAt(1)
    return dtypes_by_code()[constant(code)] if _is_number(code) else None


_TO_LAYOUT = "aten::to.dtype_layout("


def _is_number(value: Value) -> bool:
    return is_constant(value) and isinstance(constant(value), int)


def _named_dtype(node: Node) -> Value | None:
    """The argument that gives the dtype of the result, if one does."""
    text = node.schema()
    schema = parsed_schema(text) if "dtype" in text else None
    arguments = schema.arguments if schema else ()
    given = zip(arguments, node.inputs(), strict=False)
    named = (value for each, value in given if each.name in ("dtype", "out_dtype"))
    return next((value for value in named if not is_none(value)), None)


def _of_constant(value: Value) -> torch.dtype | None:
    if value.type().kind() not in ("TensorType", "ListType"):
        return None
    held = constant(value)
    tensors = held if isinstance(held, list) else [held]
    return _shared(item.dtype if isinstance(item, torch.Tensor) else None for item in tensors)


def _shared(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    found = set(dtypes)
    return found.pop() if len(found) == 1 else None
