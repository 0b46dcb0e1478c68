"""Casts: what a policy does to one operator, written into the graph.

A cast is ``x.to(table[on_device][x.dtype])``, where the constant table maps each dtype to itself,
except that eligible dtypes map to the target, for tensors on the region's device. ``to`` returns
its input where the dtype is right, so that this is eager's rule for every dtype, with eager's
gradient, in every libtorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from .. import policy
from ..errors import LoweringError
from ..policy import Policy, Rule
from . import queries
from ._graph import (
    TABLE_SIZE,
    Editor,
    Node,
    Value,
    dtype_code,
    dtypes_by_code,
    is_none,
    is_optional_tensor,
    is_tensor,
    is_tensor_list,
    source_of,
)
from .regions import Site
from .state import DeviceRegion, supported_codes

Table = list[list[int]]
"""What each dtype is cast to, ``[elsewhere, on the region's device]`` by the dtype's number."""

_ON_DEVICE = dict.fromkeys(("cpu", "cuda", "xpu", "mps", "mtia", "maia", "ipu", "xla"))
_FLOAT32 = dtype_code(torch.float32)


def _on_device(device_type: str) -> str:
    """TorchScript for: the tensor ``x`` lies where a region on the device type casts."""
    return " or ".join(
        f"x.is_{name}" if name in _ON_DEVICE else f"x.device.type == '{name}'"
        for name in policy.eligible_device_types(device_type)
    )


def _identity() -> list[int]:
    return list(range(TABLE_SIZE))


@lru_cache(maxsize=None)
def _eligible_codes() -> tuple[int, ...]:
    return tuple(
        code
        for code, dtype in dtypes_by_code().items()
        if dtype.is_floating_point and dtype != torch.float64
    )


def cast_table(target: int | None) -> Table:
    """The table that casts eligible tensors to the dtype with the number ``target``, or nothing."""
    on_device = _identity()
    if target is not None:
        for code in _eligible_codes():
            on_device[code] = target
    return [_identity(), on_device]


_CAST = """
def cast(x: Tensor, table: List[List[int]]) -> Tensor:
    return x.to(table[int({on_device})][x.dtype])
"""

_CAST_OPTIONAL = """
def cast_optional(x: Optional[Tensor], table: List[List[int]]) -> Optional[Tensor]:
    if x is not None:
        x = x.to(table[int({on_device})][x.dtype])
    return x
"""

_CAST_LIST = """
def cast_list(xs: List[Tensor], table: List[List[int]]) -> List[Tensor]:
    return [x.to(table[int({on_device})][x.dtype]) for x in xs]
"""

_WIDEST = """
def widest(x: Tensor, widest_so_far: int, lower: int) -> int:
    if ({on_device}) and x.is_floating_point() and x.dtype != torch.float64:
        if widest_so_far == torch.float32 or x.dtype == torch.float32:
            widest_so_far = torch.float32
        elif widest_so_far != lower or x.dtype != lower:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest_so_far
"""

_WIDEST_OF_LIST = """
def widest_of_list(xs: List[Tensor], widest_so_far: int, lower: int) -> int:
    for x in xs:
        if ({on_device}) and x.is_floating_point() and x.dtype != torch.float64:
            if widest_so_far == torch.float32 or x.dtype == torch.float32:
                widest_so_far = torch.float32
            elif widest_so_far != lower or x.dtype != lower:
                raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return widest_so_far
"""

_CHOOSE_TABLE = """
def choose(enabled: bool, index: int, tables: List[List[List[int]]]) -> List[List[int]]:
    return tables[index if enabled else 0]
"""

_INDEX = """
def index(dtype: int, supported: List[int]) -> int:
    return supported.index(dtype) + 1 if dtype in supported else 0
"""

_FLOAT32_DTYPE = """
def float32_dtype(x: Tensor, enabled: bool, given: Optional[int]) -> Optional[int]:
    if given is None and enabled and ({on_device}):
        if x.is_floating_point() and x.dtype != torch.float64:
            given = torch.float32
    return given
"""

_APPENDED_DTYPE = """
def appended_dtype(x: Tensor, enabled: bool) -> int:
    dtype = x.dtype
    if enabled and ({on_device}) and x.is_floating_point() and dtype != torch.float64:
        dtype = torch.float32
    return dtype
"""

_REFUSE = """
def refuse(enabled: bool, message: str) -> None:
    if enabled:
        raise RuntimeError(message)
"""


def insert_casts(editor: Editor, sites: Sequence[Site]) -> None:
    """Write into the graph what autocast does to each node.

    Args:
        editor: of the graph that holds the nodes.
        sites: nodes with the state they run in.
    """
    for site in sites:
        schema = site.node.schema()
        for device_type, region in site.state.active().items():
            rule = rule_of(device_type, schema)
            if rule is not None:
                operator = _Operator(editor, site.node, device_type, region)
                _WRITERS[rule.policy](operator, rule)


@lru_cache(maxsize=None)
def _parsed(schema: str) -> torch._C.FunctionSchema | None:
    return None if schema == "(no schema)" else torch._C.parse_schema(schema)


@lru_cache(maxsize=None)
def rule_of(device_type: str, schema: str) -> Rule | None:
    """What autocast on the device type does to the operator with the schema, given as text."""
    parsed = _parsed(schema)
    if parsed is None:
        return None
    return policy.find(device_type, parsed.name, parsed.overload_name)


class _Operator:
    """One node in one device's region, and the pieces that the policies are written with."""

    def __init__(self, editor: Editor, node: Node, device_type: str, region: DeviceRegion) -> None:
        self.editor = editor
        self.node = node
        self.device_type = device_type
        self.region = region
        self._on_device = _on_device(device_type)

    def write(self, source: str, *inputs: Value) -> Value:
        """Insert a template before the node, for the region's device."""
        return self.editor.before(self.node, source.format(on_device=self._on_device), *inputs)

    def value(self, known: object) -> Value:
        return queries.as_value(self.editor, self.node, known)

    def cast_all(self, table: Value) -> None:
        """Cast every argument that is, may be or holds tensors."""
        for index, value in enumerate(list(self.node.inputs())):
            cast = self._cast(value, table)
            if cast is not None:
                self.node.replaceInput(index, cast)

    def _cast(self, value: Value, table: Value) -> Value | None:
        if is_tensor(value):
            return self.write(_CAST, value, table)
        if is_optional_tensor(value):
            return self.write(_CAST_OPTIONAL, value, table)
        if not is_tensor_list(value):
            return None
        made_by = value.node()
        if made_by.kind() == "prim::ListConstruct" and len(value.uses()) == 1:
            casts = [self.write(_CAST, part, table) for part in made_by.inputs()]
            made = self.editor.node_before(self.node, "prim::ListConstruct", *casts)
            made.output().setType(value.type())
            return made.output()
        return self.write(_CAST_LIST, value, table)

    def table(self, targets: Sequence[int], index: int | Value) -> Value:
        """The table for the target with the given index, where index 0 stands for no cast."""
        tables = [cast_table(None), *map(cast_table, targets)]
        key = (self.device_type, *targets)
        if isinstance(index, int):
            return self.editor.shared_constant((*key, index), tables[index])
        return self.write(
            _CHOOSE_TABLE,
            self.value(self.region.enabled),
            index,
            self.editor.shared_constant(key, tables),
        )


def _lower(operator: _Operator, rule: Rule) -> None:
    region = operator.region
    targets = supported_codes(operator.device_type)
    if isinstance(region.dtype, int) and region.enabled is True:
        index: int | Value = targets.index(region.dtype) + 1
    elif isinstance(region.dtype, int):
        index = operator.value(targets.index(region.dtype) + 1)
    else:
        supported = operator.editor.constant_before(operator.node, list(targets))
        index = operator.write(_INDEX, region.dtype, supported)
    operator.cast_all(operator.table(targets, index))


def _float32(operator: _Operator, rule: Rule) -> None:
    index = 1 if operator.region.enabled is True else operator.value(1)
    operator.cast_all(operator.table((_FLOAT32,), index))


def _promote(operator: _Operator, rule: Rule) -> None:
    region = operator.region
    lower = operator.value(region.dtype)
    widest = lower
    for value in operator.node.inputs():
        if is_tensor(value):
            widest = operator.write(_WIDEST, value, widest, lower)
        elif is_tensor_list(value):
            widest = operator.write(_WIDEST_OF_LIST, value, widest, lower)
    targets = supported_codes(operator.device_type)
    targets += (_FLOAT32,) if _FLOAT32 not in targets else ()
    supported = operator.editor.constant_before(operator.node, list(targets))
    operator.cast_all(operator.table(targets, operator.write(_INDEX, widest, supported)))


def _optional_dtype(operator: _Operator, rule: Rule) -> None:
    node = operator.node
    schema = _parsed(node.schema())
    assert schema is not None
    first = node.inputsAt(0)
    enabled = operator.value(operator.region.enabled)
    for index in policy.optional_dtype_arguments(schema):
        given = node.inputsAt(index)
        if is_none(given) or given.type().kind() == "OptionalType":
            node.replaceInput(index, operator.write(_FLOAT32_DTYPE, first, enabled, given))


def _appended_dtype(operator: _Operator, rule: Rule) -> None:
    node = operator.node
    enabled = operator.value(operator.region.enabled)
    dtype = operator.write(_APPENDED_DTYPE, node.inputsAt(0), enabled)
    replacement = operator.editor.node_before(node, node.kind(), *node.inputs(), dtype)
    replacement.copyMetadata(node)
    replacement.output().setType(node.output().type())
    node.output().replaceAllUsesWith(replacement.output())
    node.destroy()


def _refuse(operator: _Operator, rule: Rule) -> None:
    message = f"{rule.message}\n  at {source_of(operator.node)}"
    operator.write(_REFUSE, operator.value(operator.region.enabled), operator.value(message))


def _cast_inputs(operator: _Operator, rule: Rule) -> None:
    assert rule.dtype is not None
    index = 1 if operator.region.enabled is True else operator.value(1)
    operator.cast_all(operator.table((dtype_code(rule.dtype),), index))


_WRITERS: dict[Policy, Callable[[_Operator, Rule], None]] = {
    Policy.LOWER: _lower,
    Policy.FLOAT32: _float32,
    Policy.PROMOTE: _promote,
    Policy.FLOAT32_OPTIONAL_DTYPE: _optional_dtype,
    Policy.FLOAT32_APPENDED_DTYPE: _appended_dtype,
    Policy.REFUSED: _refuse,
    Policy.CAST_INPUTS: _cast_inputs,
}
