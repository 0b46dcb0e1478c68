"""Operators and casts, read off a flat graph."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from amp_script.compute.dtypes import Dtypes, cast_dtype, infer
from amp_script.lowering._graph import Block, Node, Value, parsed_schema, places_of, source_line
from amp_script.lowering.functions import CALLS, name_of
from amp_script.metadata import InputSpec

from .flat import Flat, cast_helper
from .model import Cast, Operator, Origin
from .rules import JIT_CASTS, Rules, cast_target, given_dtype

__all__ = ["Reading"]


@dataclass(frozen=True)
class Reading:
    """What one method says about its operators.

    Attributes:
        flat: the method.
        dtypes: dtypes of its values.
    """

    flat: Flat
    dtypes: Dtypes

    @classmethod
    def of(cls, flat: Flat, inputs: Sequence[InputSpec]) -> Reading:
        """Read a method, with specs of its inputs where they are known."""
        rules = Rules(flat, inputs)
        return cls(flat, infer(flat.graph, rules.inputs, rules, rules.ranks))

    @cached_property
    def _nodes(self) -> Mapping[int, Node]:
        """Every operator by the number of its first result, in the order of the program."""
        found = (node for node in _in_order(self.flat.graph.block()) if _is_operator(node))
        return {_number(node): node for node in found}

    @cached_property
    def _counted(self) -> Mapping[int, Node]:
        """The operators outside paths for calls that record gradients."""
        left_out = self.flat.gradient_paths
        return {key: node for key, node in self._nodes.items() if key not in left_out}

    @property
    def gradient_operators(self) -> int:
        """How many operators are left out, because they run only where gradients are recorded."""
        return len(self._nodes) - len(self._counted)

    def operators(self, start: int) -> list[Operator]:
        """The operators, in the order of the program, the first of them at index ``start``."""
        index_of = {key: index for index, key in enumerate(self._counted, start)}
        return [self._operator(node, index_of) for node in self._counted.values()]

    def _operator(self, node: Node, index_of: Mapping[int, int]) -> Operator:
        makers = dict.fromkeys(_number(maker) for maker in self._makers(node))
        return Operator(
            method=self.flat.name,
            name=str(node.outputsAt(0).debugName()),
            kind=_kind(node),
            dtype=self.dtypes.of(node.outputsAt(0)),
            submodule=self.flat.submodules.get(_number(node)),
            source=_source(node),
            inputs=tuple(index_of[maker] for maker in makers if maker in index_of),
            operands=tuple(map(self.dtypes.of, _tensors_taken(node))),
        )

    def casts(self, start: int) -> list[Cast]:
        """The casts among the operators, whose first is at index ``start``."""
        numbered = enumerate(self._counted.values(), start)
        casts = [self._cast(index, node) for index, node in numbered if _is_cast(node)]
        return [cast for cast in casts if cast.before is None or cast.before != cast.after]

    def _cast(self, index: int, node: Node) -> Cast:
        source = next(iter(_tensors_taken(node)))
        return Cast(
            operator=index,
            before=self.dtypes.of(source),
            after=cast_target(node) or self.dtypes.of(node.outputsAt(0)),
            origin=_origin(source),
            feeds=tuple(dict.fromkeys(self._takers[_number(node)])),
            conditional=node.kind() in CALLS or node.kind() in JIT_CASTS,
        )

    def _makers(self, node: Node) -> list[Node]:
        """The operators that make what an operator takes."""
        ends = [end for value in _tensors_taken(node) for end in _ends(value)]
        return [end.node() for end in ends if _is_operator(end.node())]

    @cached_property
    def _takers(self) -> Mapping[int, list[str]]:
        """Kinds of what takes an operator's result, by the number of that result."""
        takers: dict[int, list[str]] = defaultdict(list)
        for node in self._counted.values():
            for maker in self._makers(node):
                takers[_number(maker)].append(_kind(node))
        for value in self.flat.graph.outputs():
            for end in _ends(value):
                if _is_operator(end.node()):
                    takers[_number(end.node())].append("output")
        return takers


def _in_order(block: Block) -> Iterator[Node]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _in_order(inner)


def _number(node: Node) -> int:
    """The number of a node's first result, which stands for the node."""
    return int(node.outputsAt(0).unique())


def _kind(node: Node) -> str:
    """The qualified name of what a node runs."""
    helper = cast_helper(node)
    if helper is not None:
        return f"amp_script::{helper}"
    return name_of(node) if node.kind() in CALLS else str(node.kind())


def _source(node: Node) -> str:
    """The innermost line that is not torch's own, or else the innermost."""
    places = [place for place in places_of(node) if not _MADE_UP.match(place[0])]
    chosen = next((place for place in places if not _TORCH.search(place[0])), None)
    file, line = chosen or next(iter(places), ("", 0))
    return source_line(file, line) if file else ""


_MADE_UP: Final = re.compile(r"<string>$|code/__torch__")
"""What TorchScript names where no file has the source: a function that a pass made, and the code
in an archive."""

_TORCH: Final = re.compile(r"(^|[/\\])torch[/\\]([^/\\]+\.py$|nn[/\\]|jit[/\\]|_\w+[/\\])")
"""A file of torch's, in whatever folder torch is installed where the program was made."""


def _is_operator(node: Node) -> bool:
    """Whether the node makes or changes a tensor, and does not merely hand it on."""
    kind = node.kind()
    if kind in _UNKNOWN_BODIES or _ONEDNN.match(kind):
        return any(map(_holds_tensor, node.outputs()))
    schema = parsed_schema(node.schema())
    if kind.startswith("prim::") or schema is None:
        return False
    # What hands values on has a type variable in its schema.
    return any("Tensor" in result.type.annotation_str for result in schema.returns)


_UNKNOWN_BODIES: Final = frozenset({*CALLS, "prim::PythonOp"})
"""Calls that are left in a flat graph."""

_ONEDNN: Final = re.compile("prim::(mkldnn|MKLDNN|BroadcastMKLDNN)")
"""What ``torch.jit.optimize_for_inference`` puts in the place of operators."""


def _holds_tensor(value: Value) -> bool:
    return "Tensor" in value.type().annotation_str


def _tensors_taken(node: Node) -> list[Value]:
    # Of a cast of a lowered program, the cache of casts is one too.
    taken = [value for value in node.inputs() if _holds_tensor(value)]
    return taken[:1] if cast_helper(node) else taken


def _is_cast(node: Node) -> bool:
    kind = node.kind()
    if cast_helper(node) is not None or cast_dtype(node) is not None or kind in JIT_CASTS:
        return True
    if kind == "aten::type_as" or node.schema().startswith("aten::to.other("):
        return True
    return kind in ("aten::to", "aten::_to_copy") and given_dtype(node) is not None


# --- where values come from -----------------------------------------------------------------------


def _ends(value: Value) -> Iterator[Value]:
    """The values that another one may be, once all that merely hands on is passed by."""
    pending, seen = [value], set[int]()
    while pending:
        current = pending.pop()
        if current.unique() in seen:
            continue
        seen.add(current.unique())
        handed_on, put_into = _handed_on(current), _put_into(current)
        pending += reversed([*handed_on, *put_into])
        if not handed_on and not (put_into and current.node().kind() in _EMPTY):
            yield current


def _handed_on(value: Value) -> list[Value]:
    """What a value is, or is made of, if its node merely hands on."""
    node = value.node()
    kind = node.kind()
    if kind == "prim::If":
        return [list(block.outputs())[value.offset()] for block in node.blocks()]
    if kind == "prim::Loop":
        (body,) = node.blocks()
        return [node.inputsAt(value.offset() + 2), list(body.outputs())[value.offset() + 1]]
    if kind == "prim::Param":
        return _carried(value)
    if _is_operator(node) or kind in ("prim::Constant", "prim::GetAttr"):
        return []
    return [each for each in node.inputs() if _holds_tensor(each)]


def _put_into(value: Value) -> list[Value]:
    """What is put into a list or a dictionary after it was made."""
    changes = [use.user for use in value.uses() if use.offset == 0 and "!" in use.user.schema()]
    return [
        each
        for node in changes
        if not _is_operator(node)
        for each in list(node.inputs())[1:]
        if _holds_tensor(each)
    ]


_EMPTY: Final = ("prim::ListConstruct", "prim::DictConstruct")
"""What makes a container, which may have nothing in it at first."""


def _carried(value: Value) -> list[Value]:
    """What a parameter of a loop's body is, in the first run of the body and in later ones."""
    block = value.node().owningBlock()
    loop = block.owningNode()
    if loop is None or loop.kind() != "prim::Loop" or value.offset() == 0:
        return []
    return [loop.inputsAt(value.offset() + 1), list(block.outputs())[value.offset()]]


_ROOTS: Final[Mapping[str, Origin]] = {
    "prim::Param": "input",
    "prim::GetAttr": "weight",
    "prim::Constant": "constant",
}
"""What the results of nodes are that take nothing; all others are computed."""


def _origin(value: Value) -> Origin:
    """What a value is; what is computed before an input, and an input before a weight."""
    kinds = {end.node().kind() for end in _ends(value)}
    computed = not kinds or bool(kinds - _ROOTS.keys())
    return "activation" if computed else next(_ROOTS[kind] for kind in _ROOTS if kind in kinds)
