"""Which dtypes follow from a program, for people to read.

Compute plans rely on :func:`amp_script.compute.dtypes.results`; here is what else follows, of
integers and booleans too. A dtype that does not follow stays unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import torch

from amp_script.compute.dtypes import Dtypes, cast_dtype, input_name
from amp_script.compute.dtypes import results as planned
from amp_script.compute.operators import aten
from amp_script.lowering._graph import (
    Node,
    Value,
    constant,
    dtypes_by_code,
    is_constant,
    is_none,
    is_tensor,
    parsed_schema,
)
from amp_script.lowering.known import AS_FIRST
from amp_script.metadata import InputSpec

from .flat import Flat, cast_helper

__all__ = ["JIT_CASTS", "Rules", "cast_target", "given_dtype"]

_Found: TypeAlias = "Sequence[torch.dtype | None]"


class Rules:
    """Tells the dtypes of nodes' results; see :data:`amp_script.compute.dtypes.Rule`.

    Args:
        flat: the method.
        inputs: specs of its inputs, as far as there are any.
    """

    def __init__(self, flat: Flat, inputs: Sequence[InputSpec]) -> None:
        self._flat = flat
        self._specs = {spec.name: spec for spec in inputs}
        self._paths = {value.unique(): input_name(value) for value in flat.graph.inputs()}

    @cached_property
    def inputs(self) -> Mapping[str, torch.dtype]:
        """Dtypes of the tensors that are inputs: from specs, or else from a trace's example."""
        values = self._tensor_inputs()
        names = [input_name(value) for value in values]  # a trace may name two inputs alike
        noted = {
            name: value.type().dtype()
            for name, value in zip(names, values, strict=True)
            if names.count(name) == 1
        }
        given = {name: spec.dtype for name, spec in self._specs.items()}
        return {name: dtype for name, dtype in {**noted, **given}.items() if dtype is not None}

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """How many dimensions inputs and attributes have."""
        ranks = {
            key: held.dim()
            for key, held in self._flat.attributes.items()
            if isinstance(held, torch.Tensor)
        }
        for value in self._tensor_inputs():
            spec = self._specs.get(input_name(value))
            kind: Any = value.type()
            shape = kind.varyingSizes() if spec is None else spec.shape
            if shape is not None:
                ranks[value.unique()] = len(shape)
        return ranks

    def _tensor_inputs(self) -> list[Value]:
        return [value for value in self._flat.graph.inputs() if is_tensor(value)]

    def __call__(self, node: Node, dtypes: Dtypes) -> _Found:
        """The dtypes of a node's results, none at all where nothing is known."""
        if self._is_left_to_jit(node):
            dtype = cast_dtype(node)
            return [] if dtype is None else [dtype]
        if node.kind() == "prim::GetAttr":
            return [_dtype_of(self._flat.attributes.get(node.output().unique()))]
        for rule in (planned, self._of_input, *_RULES):
            found = rule(node, dtypes)
            if any(found):
                return found
        return []

    def _is_left_to_jit(self, node: Node) -> bool:
        """Whether the JIT's autocast pass may cast what the node takes."""
        in_regions = self._flat.in_regions
        is_plumbing = node.kind().startswith("prim::")
        return not is_plumbing and any(value.unique() in in_regions for value in node.outputs())

    def _of_input(self, node: Node, dtypes: Dtypes) -> _Found:
        """Parts of an input that is no tensor, which specs name by their paths."""
        if node.kind() not in ("prim::TupleUnpack", "prim::TupleIndex", "aten::__getitem__"):
            return []
        path = self._paths.get(node.inputsAt(0).unique())
        if path is None:
            return []
        if node.kind() == "prim::TupleUnpack":
            keys: list[object] = list(range(node.outputsSize()))
        elif is_constant(node.inputsAt(1)):
            keys = [constant(node.inputsAt(1))]
        else:
            return []
        inside = [f"{path}[{key!r}]" for key in keys]
        self._paths.update(zip((value.unique() for value in node.outputs()), inside, strict=True))
        specs = [self._specs.get(each) for each in inside]
        return [None if spec is None else spec.dtype for spec in specs]


def _dtype_of(held: object) -> torch.dtype | None:
    """The dtype of a tensor, or of all tensors in a list."""
    items = held if isinstance(held, (list, tuple)) else [held]
    found = {item.dtype if isinstance(item, torch.Tensor) else None for item in items}
    return found.pop() if len(found) == 1 else None


def given_dtype(node: Node) -> torch.dtype | None:
    """The dtype that a node is told to return, by a constant argument called ``dtype``."""
    schema = parsed_schema(node.schema())
    for argument, value in zip(schema.arguments if schema else (), node.inputs(), strict=False):
        if argument.name in ("dtype", "out_dtype") and is_constant(value):
            code = constant(value)
            return dtypes_by_code().get(code) if isinstance(code, int) else None
    return None


def _takes_unknown_dtype(node: Node) -> bool:
    """Whether a dtype is given that only a run knows."""
    schema = parsed_schema(node.schema())
    return any(
        argument.name == "dtype" and not is_constant(value)
        for argument, value in zip(schema.arguments if schema else (), node.inputs(), strict=False)
    )


# --- one rule a group of operators ----------------------------------------------------------------


def _named(node: Node, dtypes: Dtypes) -> _Found:
    dtype = given_dtype(node)
    return [] if dtype is None else [dtype]


def cast_target(node: Node) -> torch.dtype | None:
    """The dtype that a lowered program's cast is told to cast to, if it is known."""
    numbers = [value for value in node.inputs() if value.type().kind() == "IntType"]
    if cast_helper(node) is None or not all(map(is_constant, numbers)):
        return None
    return dtypes_by_code().get(constant(numbers[-1]))


def _lowered_cast(node: Node, dtypes: Dtypes) -> _Found:
    """A lowered program's cast, which leaves alone what autocast would."""
    target = cast_target(node)
    before = None if target is None else dtypes.of(node.inputsAt(1))
    if before is None or not before.is_floating_point or before is torch.float64:
        return [before]
    return [target]


JIT_CASTS: Final = aten("_autocast_to_reduced_precision _autocast_to_full_precision")
"""Casts by which other programs do what autocast does; they are told by flags whether to."""


def _jit_cast(node: Node, dtypes: Dtypes) -> _Found:
    before = dtypes.of(node.inputsAt(0)) if node.kind() in JIT_CASTS else None
    if before is None or not all(map(is_constant, list(node.inputs())[1:])):
        return []
    on_cuda, on_cpu, *targets = [constant(value) for value in list(node.inputs())[1:]]
    reduced = node.kind().endswith("reduced_precision")
    is_cast = before is torch.float32 if reduced else before in (torch.float16, torch.bfloat16)
    if not is_cast or not (on_cuda or on_cpu):
        return [before]
    # What is cast depends on where the tensor is, unless both flags say the same.
    codes = {*targets[: 1 if on_cuda else 0], *targets[1 if on_cpu else 2 :]}
    if on_cuda != on_cpu or len(codes) > 1:
        return []
    return [dtypes_by_code().get(codes.pop()) if reduced else torch.float32]


_AS_ARGUMENT: Final = (
    AS_FIRST
    | aten(
        "zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones "
        "new_empty new_full masked_fill index repeat_interleave flip sort topk cummax cummin "
        "detach cumsum diagonal unbind chunk split split_with_sizes tensor_split"
    )
    | {"prim::unchecked_cast", "aten::_unwrap_optional", "aten::wait"}
)
"""Nodes whose first result has the dtype of their first argument, unless one is given."""

_WITH_INDICES: Final = aten("sort topk cummax cummin")
"""Operators whose second result is of indices."""

_SUMS: Final = aten("cumsum")
"""Operators that return 64-bit integers where they are given smaller ones."""

_BOOL: Final = aten(
    "eq ne lt le gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite "
    "isneginf isposinf isclose isin logical_not logical_and logical_or logical_xor"
)
"""Operators whose result is of booleans."""

_INT64: Final = aten("argmax argmin argsort nonzero count_nonzero one_hot")
"""Operators whose result is of 64-bit integers."""


def _by_table(node: Node, dtypes: Dtypes) -> _Found:
    kind = node.kind()
    if kind in _BOOL:
        return [torch.bool]
    if kind in _INT64:
        return [torch.int64]
    if kind not in _AS_ARGUMENT or _takes_unknown_dtype(node):
        return []
    first = dtypes.of(node.inputsAt(0))
    if kind in _SUMS and first is not None and not first.is_floating_point:
        return [torch.int64]
    return [first, torch.int64] if kind in _WITH_INDICES else [first]


_EXACT: Final = aten(
    "add sub rsub mul floor_divide remainder maximum minimum abs neg clamp clamp_min clamp_max "
    "sum prod where cat concat stack bitwise_and bitwise_or bitwise_xor"
)
"""Operators that return 64-bit integers where all that they are given are integers, one of 64 bits
among them."""


_BITWISE: Final = aten("__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor bitwise_not")
"""Operators that return booleans where all that they are given is boolean."""


def _of_booleans(node: Node, dtypes: Dtypes) -> _Found:
    tensors = {dtypes.of(value) for value in node.inputs()}
    return [torch.bool] if node.kind() in _BITWISE and tensors == {torch.bool} else []


def _of_integers(node: Node, dtypes: Dtypes) -> _Found:
    if node.kind() == "aten::arange":
        kinds = {value.type().kind() for value in node.inputs() if not is_none(value)}
        is_whole = kinds <= {"IntType", "BoolType", "DeviceObjType"}
        return [torch.int64] if is_whole and not _takes_unknown_dtype(node) else []
    if node.kind() not in _EXACT:
        return []
    tensors = []
    for value in node.inputs():
        if value.type().kind() in ("TensorType", "ListType"):
            tensors.append(dtypes.of(value))
        elif value.type().kind() not in ("IntType", "BoolType", "NoneType"):
            return []
    integers = [dtype for dtype in tensors if dtype is not torch.bool]
    return [torch.int64] if set(integers) == {torch.int64} else []


def _from_number(node: Node, dtypes: Dtypes) -> _Found:
    """Tensors that are made of Python integers, as a frozen program writes ``x + 1``."""
    if node.kind() == "prim::NumToTensor":
        return [torch.int64] if node.inputsAt(0).type().kind() == "IntType" else []
    if node.kind() == "prim::Constant" and is_tensor(node.output()):
        return [torch.int64] if type(constant(node.output())) is int else []
    return []


def _of_tuple(node: Node, dtypes: Dtypes) -> _Found:
    """Items of a tuple that is put together in the same program."""
    if node.kind() not in ("prim::TupleUnpack", "prim::TupleIndex"):
        return []
    made = node.inputsAt(0).node()
    if made.kind() != "prim::TupleConstruct":
        return []
    items = [dtypes.of(value) for value in made.inputs()]
    if node.kind() == "prim::TupleUnpack":
        return items
    index: Any = constant(node.inputsAt(1)) if is_constant(node.inputsAt(1)) else None
    return [] if index is None else [items[index]]


_RULES: Final[Sequence[Callable[[Node, Dtypes], _Found]]] = (
    _lowered_cast,
    _jit_cast,
    _named,
    _by_table,
    _of_booleans,
    _of_integers,
    _from_number,
    _of_tuple,
)
