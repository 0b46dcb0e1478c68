"""Autocast regions: where they begin and end, and the state that each node runs in.

TorchScript compiles ``with autocast(...)`` to an object, ``prim::Enter`` and ``prim::Exit``, which
nest inside one block whatever the control flow. Region objects become tuples of what their
constructor was given, wherever they are kept; one walk over the program with a stack of states
then answers the queries it meets.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from ..errors import LoweringError
from . import queries
from ._graph import (
    Block,
    Editor,
    Graph,
    Node,
    Type,
    Value,
    all_values,
    constant,
    dtypes_by_code,
    is_constant,
    is_none,
    retyped,
    source_of,
)
from .composites.registry import decompositions, may_be_composite
from .helpers import helper
from .state import OFF, DeviceRegion, ProgramState, supported_codes

_REGION_CLASSES = {
    "__torch__.torch.amp.autocast_mode.autocast": None,
    "__torch__.torch.cpu.amp.autocast_mode.autocast": "cpu",
    "__torch__.torch.cuda.amp.autocast_mode.autocast": "cuda",
}
"""The classes that TorchScript's own pass knows by name, and the device type each stands for."""

_REACHING = frozenset({"prim::CallMethod", "prim::CallFunction", "prim::fork", "prim::PythonOp"})
"""Nodes that run something outside the graph."""

_MANGLED = re.compile(r"___torch_mangle_\d+\.")

_FIELDS = ("device", "fast_dtype", "_enabled", "_cache_enabled")
"""Attributes of a region object, in the order of the tuple that takes its place."""

ARGUMENT_NAMES = "amp_script_argument_names"
"""Attribute of a node that calls the constructor of a region: the names of its arguments."""


def region_class(kind: Type) -> str | None:
    """The name of the autocast class that the type is; None for every other type."""
    if kind.kind() != "ClassType":
        return None
    name = _MANGLED.sub("", kind.qualified_name())
    return name if name in _REGION_CLASSES else None


def is_region_constructor(node: Node) -> bool:
    """Whether the node calls the ``__init__`` of an autocast class."""
    return (
        node.kind() == "prim::CallMethod"
        and node.s("name") == "__init__"
        and region_class(node.inputsAt(0).type()) is not None
    )


class Regions:
    """Where regions begin and end in a graph, and the state that is on at each place.

    Args:
        editor: of the graph.
        start: the state at the start.
    """

    def __init__(self, editor: Editor, start: ProgramState) -> None:
        self._editor = editor
        self._start = start
        self._inside: dict[Node, ProgramState] = {}
        self._composites: dict[Node, ProgramState] = {}

    def active(self, composite: Node) -> Sequence[str]:
        """The device types on which autocast is on, or may be, at an operator that may be one."""
        return [name for name, _ in self._composites.get(composite, self._start).active()]

    def may_hold_composites(self) -> bool:
        """Whether an operator that may be composite runs where autocast may be on."""
        find = self._editor.graph.findNode
        if not self._inside and not self._start.active():
            return False
        return any(find(name) is not None for name in _composite_names())

    def remove(self) -> list[Site]:
        """Remove every begin and end.

        Returns:
            The operators and calls in the order in which they run; calls alone where autocast is
            off in the whole graph.
        """
        if not self._inside and not self._start.active():
            graph = self._editor.graph
            calls = [node for kind in _REACHING for node in graph.findAllNodes(kind)]
            return [Site(node, self._start, (), False) for node in calls]
        sites: list[Site] = []
        self._remove_from(self._editor.graph.block(), self._start, (), False, sites)
        return sites

    def _remove_from(
        self,
        block: Block,
        state: ProgramState,
        path: tuple[int, ...],
        in_loop: bool,
        sites: list[Site],
    ) -> None:
        states = [state]
        path = (*path, len(sites))
        for node in list(block.nodes()):
            kind = node.kind()
            if not kind.startswith("prim::") or kind in _REACHING:
                sites.append(Site(node, states[-1], path, in_loop))
            elif node in self._inside:
                states.append(self._inside[node])
                node.destroy()
            elif kind == "prim::Exit" and _is_region(node.inputsAt(0)):
                states.pop()
                node.destroy()
            else:
                for number, inner in enumerate(node.blocks()):
                    loops = in_loop or kind == "prim::Loop"
                    self._remove_from(inner, states[-1], (*path, number), loops, sites)


@dataclass(frozen=True)
class Site:
    """An operator, or a call of something outside the graph, and the state it runs in.

    Attributes:
        node: the operator or call.
        state: what autocast does there.
        path: numbers that tell the blocks that the operator is in, the outermost first.
        in_loop: whether a block of a loop is among them.
    """

    node: Node
    state: ProgramState
    path: tuple[int, ...]
    in_loop: bool


def resolve_regions(editor: Editor, start: ProgramState) -> Regions:
    """Find the state at every place in a graph, and answer its questions about it.

    Args:
        editor: of the graph to change.
        start: the state at the start.

    Raises:
        LoweringError: a region object is changed after it was made.
    """
    graph = editor.graph
    if graph.findNode("prim::Enter") or graph.findNode("prim::CreateObject"):
        _retype(graph)
        return _Walk(editor, start).regions
    for kind in queries.QUERIES:
        for query in graph.findAllNodes(kind):
            queries.answer(editor, query, start)
    return Regions(editor, start)


@cache
def _composite_names() -> frozenset[str]:
    return frozenset(each.operator.partition(".")[0] for each in decompositions())


@cache
def _region_tuple() -> Type:
    string, boolean = torch._C.StringType.get(), torch._C.BoolType.get()
    return torch._C.TupleType([string, torch._C.IntType.get(), boolean, boolean])


def _field_type(index: int) -> Type:
    return _region_tuple().containedTypes()[index]


def _tuple_for(kind: Type) -> Type | None:
    return _region_tuple() if region_class(kind) is not None else None


def _retype(graph: Graph) -> None:
    """Give tuples' types to all that may be regions, but objects as they are made or read."""
    for value in all_values(graph):
        if value.node().kind() not in ("prim::CreateObject", "prim::GetAttr"):
            kind = retyped(value.type(), _tuple_for)
            if kind is not None:
                value.setType(kind)


def _is_region(value: Value) -> bool:
    kind = value.type()
    return region_class(kind) is not None or bool(kind == _region_tuple())


class _Walk:
    """One walk over a graph, block by block, in the order in which it runs."""

    def __init__(self, editor: Editor, start: ProgramState) -> None:
        self.regions = Regions(editor, start)
        self._editor = editor
        self._fields: dict[Node, dict[str, Value]] = {}
        self._block(editor.graph.block(), start)

    def _block(self, block: Block, state: ProgramState) -> None:
        states = [state]
        for node in list(block.nodes()):
            kind = node.kind()
            if not kind.startswith("prim::"):
                if kind in queries.QUERIES:
                    queries.answer(self._editor, node, states[-1])
                elif may_be_composite(kind):
                    self.regions._composites[node] = states[-1]
            elif kind not in _HANDLERS or not _HANDLERS[kind](self, node, states):
                for inner in node.blocks():
                    self._block(inner, states[-1])

    def construct(self, node: Node, states: list[ProgramState]) -> bool:
        """Put a tuple in the place of an object and its constructor."""
        region = node.inputsAt(0)
        name = region_class(region.type())
        if name is None:
            return False
        editor, state = self._editor, states[-1]
        given = dict(zip(node.ss(ARGUMENT_NAMES), node.inputs(), strict=True))
        device = given.get("device_type") or editor.constant_before(node, _REGION_CLASSES[name])
        dtype = self._or_ambient(node, given.get("dtype"), "int_or", device, state)
        cache = self._or_ambient(node, given.get("cache_enabled"), "bool_or", None, state)
        enabled = given.get("enabled") or editor.constant_before(node, True)
        self._put_tuple(region, node, (device, dtype, enabled, cache))
        node.destroy()
        region.node().destroy()
        return True

    def set_field(self, node: Node, states: list[ProgramState]) -> bool:
        """Put a tuple in the place of an object whose constructor was inlined."""
        if not _is_region(node.inputsAt(0)):
            return False
        region = node.inputsAt(0)
        made_by = region.node()
        if made_by.kind() != "prim::CreateObject":
            raise LoweringError(
                "autocast",
                "a region object is changed after it was made",
                source=source_of(made_by),
                advice="make a second region with the other arguments",
            )
        fields = self._fields.setdefault(made_by, {})
        fields[node.s("name")] = node.inputsAt(1)
        if len(fields) == sum(use.user.kind() == "prim::SetAttr" for use in region.uses()):
            fields.setdefault(
                "_cache_enabled", self._editor.value_before(node, states[-1].cache_enabled)
            )
            self._put_tuple(region, node, [fields[name] for name in _FIELDS])
            for use in region.uses():
                use.user.destroy()
            made_by.destroy()
        return True

    def _put_tuple(self, region: Value, node: Node, fields: Sequence[Value]) -> None:
        made = self._editor.node_before(node, "prim::TupleConstruct", *fields)
        made.copyMetadata(region.node())
        made.output().setType(_region_tuple())
        region.replaceAllUsesAfterNodeWith(node, made.output())

    def _or_ambient(
        self,
        node: Node,
        given: Value | None,
        choose: str,
        device: Value | None,
        state: ProgramState,
    ) -> Value:
        """An argument of a region, or what the state around it says if it is None."""
        if given is not None and not is_none(given) and given.type().kind() != "OptionalType":
            return given
        if device is not None:
            ambient = queries.dtype_of(self._editor, node, device, state)
        else:
            ambient = self._editor.value_before(node, state.cache_enabled)
        if given is None or is_none(given):
            return ambient
        return self._editor.call_before(node, helper(choose), given, ambient)

    def enter(self, node: Node, states: list[ProgramState]) -> bool:
        """Begin a region."""
        region = node.inputsAt(0)
        if not _is_region(region):
            return False
        states.append(self._state_inside(node, states[-1]))
        self.regions._inside[node] = states[-1]
        node.output().replaceAllUsesWith(region)
        return True

    def leave(self, node: Node, states: list[ProgramState]) -> bool:
        """End the innermost region."""
        if not _is_region(node.inputsAt(0)):
            return False
        states.pop()
        return True

    def read(self, node: Node, states: list[ProgramState]) -> bool:
        """Read a field of a region, or a region that is kept in something else."""
        if region_class(node.output().type()) is not None:
            self._read_object(node)
            return True
        if not _is_region(node.inputsAt(0)):
            return False
        field = self._field(node.inputsAt(0), _FIELDS.index(node.s("name")), node)
        node.output().replaceAllUsesWith(field)
        node.destroy()
        return True

    def _read_object(self, node: Node) -> None:
        """Make a tuple of a region object that is read from an attribute."""
        editor = self._editor
        region = node.output()
        made: Any = editor.node_before(node, "prim::TupleConstruct")
        made.moveAfter(node)
        for index, name in enumerate(_FIELDS[:3]):
            read = editor.node_before(made, "prim::GetAttr", region)
            read.s_("name", name)
            read.output().setType(_field_type(index))
            made.addInput(read.output())
        made.addInput(editor.constant_before(made, True))
        made.output().setType(_region_tuple())
        region.replaceAllUsesAfterNodeWith(made, made.output())

    def _field(self, region: Value, index: int, node: Node) -> Value:
        """One field of a region's tuple, as a constant where it is the same on every way there."""
        made_by = region.node()
        if made_by.kind() == "prim::TupleConstruct":
            return made_by.inputsAt(index)
        same = _known_field(region, index)
        if same is not None:
            return self._editor.constant_before(node, same)
        at = self._editor.constant_before(node, index)
        read = self._editor.node_before(node, "prim::TupleIndex", region, at)
        read.output().setType(_field_type(index))
        return read.output()

    def _state_inside(self, node: Node, state: ProgramState) -> ProgramState:
        editor = self._editor
        region = node.inputsAt(0)
        device, dtype, enabled, cache = (self._field(region, i, node) for i in range(4))
        state = replace(state, cache_enabled=constant(cache) if is_constant(cache) else cache)
        if state.cache is None:
            state = replace(state, cache=editor.cast_cache_before(node))
        if is_constant(device):
            name = _device_type(constant(device), state, region.node())
            return state.with_device(name, self._region(node, name, dtype, enabled))
        for name, outside in state.devices.items():
            if not supported_codes(name):
                continue
            inside = self._region(node, name, dtype, enabled)
            this = editor.constant_before(node, name)
            target, default = (
                editor.call_before(
                    node,
                    helper("inside_if"),
                    device,
                    this,
                    editor.value_before(node, first),
                    editor.value_before(node, second),
                )
                for first, second in (
                    (inside.target, outside.target),
                    (inside.dtype, outside.dtype),
                )
            )
            state = state.with_device(name, DeviceRegion(target, default))
        return state

    def _region(self, node: Node, name: str, dtype: Value, enabled: Value) -> DeviceRegion:
        """A region's own state: a dtype that the device does not support disables it."""
        region = node.inputsAt(0).node()
        supported = supported_codes(name)
        code: int | Value = constant(dtype) if is_constant(dtype) else dtype
        if is_constant(enabled) and not constant(enabled):
            return DeviceRegion(OFF, code)
        if isinstance(code, int) and is_constant(enabled):
            if code not in supported:
                warnings.warn(_unsupported(name, supported, region), stacklevel=2)
                code = OFF
            return DeviceRegion(code, constant(dtype))
        editor = self._editor
        target = editor.call_before(
            node,
            helper("region_target"),
            enabled,
            dtype,
            editor.constant_before(node, list(supported)),
            editor.constant_before(node, _unsupported(name, supported, region)),
        )
        return DeviceRegion(target, code)


_HANDLERS: dict[str, Callable[[_Walk, Node, list[ProgramState]], bool]] = {
    "prim::CallMethod": _Walk.construct,
    "prim::Enter": _Walk.enter,
    "prim::Exit": _Walk.leave,
    "prim::GetAttr": _Walk.read,
    "prim::SetAttr": _Walk.set_field,
}
"""What to do with the nodes that may be about a region; False where one is not."""


def _known_field(region: Value, index: int) -> object:
    """A field that is the same constant on both ways of a branch, or None."""
    made_by = region.node()
    if made_by.kind() == "prim::TupleConstruct":
        value = made_by.inputsAt(index)
        return constant(value) if is_constant(value) else None
    if made_by.kind() != "prim::If":
        return None
    ways = [list(way.outputs())[region.offset()] for way in made_by.blocks()]
    first, second = (_known_field(way, index) for way in ways)
    return first if first == second else None


def _device_type(name: str, state: ProgramState, node: Node) -> str:
    device_type = name.partition(":")[0]
    if device_type not in state.devices:
        raise LoweringError(
            "autocast",
            f"device type {name!r} has no autocast in torch {torch.__version__}",
            source=source_of(node),
            advice="use one of " + ", ".join(state.devices),
        )
    return device_type


def _unsupported(name: str, supported: Sequence[int], node: Node) -> str:
    names = ", ".join(str(dtypes_by_code()[code]) for code in supported)
    return (
        f"In {name.upper()} autocast, but the target dtype is not supported. Disabling autocast.\n"
        f"{name.upper()} Autocast only supports dtypes of {names} currently.\n"
        f"  at {source_of(node)}"
    )
