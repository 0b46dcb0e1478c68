"""Autocast regions: where they begin and end, and the state that each node runs in.

TorchScript compiles ``with autocast(...)`` to an object, ``prim::Enter`` and ``prim::Exit``, which
nest inside one block whatever the control flow. Region objects become tuples of what their
constructor was given, wherever they are kept; one walk over the program with a stack of states
then answers the queries it meets, and removes begins and ends.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import LoweringError
from . import queries
from ._graph import (
    Block,
    Editor,
    Graph,
    Node,
    Value,
    blocks_of,
    constant,
    dtype_code,
    dtypes_by_code,
    is_constant,
    is_none,
    source_of,
)
from .state import DeviceRegion, ProgramState, supported_codes

_REGION_CLASSES = {
    "__torch__.torch.amp.autocast_mode.autocast": None,
    "__torch__.torch.cpu.amp.autocast_mode.autocast": "cpu",
    "__torch__.torch.cuda.amp.autocast_mode.autocast": "cuda",
}
"""The classes that TorchScript's own pass knows by name, and the device type each stands for."""

_MANGLED = re.compile(r"___torch_mangle_\d+\.")

_FIELDS = ("device", "fast_dtype", "_enabled", "_cache_enabled")
"""Attributes of a region object, in the order of the tuple that takes its place."""

Parameters = Callable[[Node], Sequence[str]]
Expand = Callable[[Editor, Node, ProgramState], Sequence[Node] | None]


def region_class(kind: torch._C.Type) -> str | None:
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


@dataclass(frozen=True)
class Site:
    """A node and the autocast state it runs in."""

    node: Node
    state: ProgramState


def resolve_regions(
    graph: Graph, state: ProgramState, parameters: Parameters, expand: Expand
) -> list[Site]:
    """Remove regions and queries from the graph, and tell in which state each other node runs.

    Args:
        graph: changed in place.
        state: the state at the start.
        parameters: the parameter names of the constructor that a node calls.
        expand: puts the parts of a composite operator in its place and returns them, or None.

    Raises:
        LoweringError: a region object is changed after it was made.
    """
    _retype(graph)
    walk = _Walk(Editor(graph), parameters, expand)
    walk.block(graph.block(), state)
    return walk.sites


def _region_tuple() -> torch._C.Type:
    string, boolean = torch._C.StringType.get(), torch._C.BoolType.get()
    return torch._C.TupleType([string, torch._C.IntType.get(), boolean, boolean])


def _retyped(kind: torch._C.Type) -> torch._C.Type | None:
    """The type with tuples in the place of region objects; None if it holds none."""
    if region_class(kind) is not None:
        return _region_tuple()
    inner = kind.containedTypes()
    replaced = [_retyped(part) for part in inner] if kind.kind() in _CONTAINERS else []
    if not any(replaced):
        return None
    parts = [new or old for new, old in zip(replaced, inner, strict=True)]
    return _CONTAINERS[kind.kind()](parts)


_CONTAINERS: dict[str, Callable[[list[torch._C.Type]], torch._C.Type]] = {
    "ListType": lambda parts: torch._C.ListType(parts[0]),
    "OptionalType": lambda parts: torch._C.OptionalType(parts[0]),
    "TupleType": lambda parts: torch._C.TupleType(parts),
    "DictType": lambda parts: torch._C.DictType(parts[0], parts[1]),
}


def _retype(graph: Graph) -> None:
    for block in blocks_of(graph):
        values = list(block.inputs())
        for node in block.nodes():
            if node.kind() not in ("prim::CreateObject", "prim::GetAttr"):
                values.extend(node.outputs())
        for value in values:
            retyped = _retyped(value.type())
            if retyped is not None:
                value.setType(retyped)


class _Walk:
    """One walk over a graph, block by block, in the order in which it runs."""

    def __init__(self, editor: Editor, parameters: Parameters, expand: Expand) -> None:
        self.sites: list[Site] = []
        self._editor = editor
        self._parameters = parameters
        self._expand = expand
        self._entered = 0

    def block(self, block: Block, state: ProgramState) -> None:
        states = [state]
        pending = list(block.nodes())[::-1]
        while pending:
            node = pending.pop()
            kind = node.kind()
            if kind == "prim::Constant":
                continue
            if kind == "prim::CallMethod" and is_region_constructor(node):
                self._construct(node, states[-1])
            elif kind == "prim::Enter" and _is_region(node.inputsAt(0)):
                states.append(self._enter(node, states[-1]))
            elif kind == "prim::Exit" and _is_region(node.inputsAt(0)):
                states.pop()
                node.destroy()
            elif kind == "prim::GetAttr" and region_class(node.output().type()) is not None:
                self._read_object(node)
            elif kind == "prim::GetAttr" and _is_region(node.inputsAt(0)):
                node.output().replaceAllUsesWith(
                    self._field(node.inputsAt(0), _FIELDS.index(node.s("name")), node)
                )
                node.destroy()
            elif kind == "prim::SetAttr" and _is_region(node.inputsAt(0)):
                raise LoweringError(
                    "autocast",
                    "a region object is changed after it was made",
                    source=source_of(node),
                    advice="make a second region with the other arguments",
                )
            elif kind in queries.QUERIES:
                queries.answer(self._editor, node, states[-1])
            else:
                parts = self._expand(self._editor, node, states[-1])
                if parts is not None:
                    pending.extend(reversed(parts))
                    continue
                for inner in node.blocks():
                    self.block(inner, states[-1])
                if not kind.startswith("prim::"):
                    self.sites.append(Site(node, states[-1]))

    def _construct(self, node: Node, state: ProgramState) -> None:
        """Put a tuple in the place of an object and its constructor."""
        region = node.inputsAt(0)
        name = region_class(region.type())
        assert name is not None
        given = dict(zip(self._parameters(node), node.inputs(), strict=True))
        editor = self._editor
        device = given.get("device_type") or editor.constant_before(node, _REGION_CLASSES[name])
        dtype = given.get("dtype")
        cache = given.get("cache_enabled")
        if dtype is None or is_none(dtype):
            dtype = queries.dtype_of(editor, node, device, state)
        elif dtype.type().kind() == "OptionalType":
            ambient = queries.dtype_of(editor, node, device, state)
            dtype = editor.before(node, _OTHERWISE.format(type="int"), dtype, ambient)
        ambient_cache = queries.as_value(editor, node, state.cache_enabled)
        if cache is None or is_none(cache):
            cache = ambient_cache
        elif cache.type().kind() == "OptionalType":
            cache = editor.before(node, _OTHERWISE.format(type="bool"), cache, ambient_cache)
        enabled = given.get("enabled") or editor.constant_before(node, True)
        self._replace(region, node, (device, dtype, enabled, cache))
        node.destroy()
        if not region.uses():
            region.node().destroy()

    def _replace(self, region: Value, node: Node, fields: Sequence[Value]) -> None:
        made = self._editor.node_before(node, "prim::TupleConstruct", *fields)
        made.output().setType(_region_tuple())
        region.replaceAllUsesAfterNodeWith(node, made.output())

    def _read_object(self, node: Node) -> None:
        """Read a region object that is an attribute of something, field by field."""
        editor = self._editor
        region = node.output()
        following = list(region.uses())
        if not following:
            return
        types = dict(zip(_FIELDS, _region_tuple().containedTypes(), strict=True))
        fields = []
        after = editor.node_before(node, "prim::TupleConstruct")
        after.moveAfter(node)
        for name in _FIELDS[:3]:
            read = editor.node_before(after, "prim::GetAttr", region)
            read.s_("name", name)
            read.output().setType(types[name])
            fields.append(read.output())
        fields.append(editor.constant_before(after, True))
        for value in fields:
            after.addInput(value)
        after.output().setType(_region_tuple())
        region.replaceAllUsesAfterNodeWith(after, after.output())

    def _field(self, region: Value, index: int, node: Node) -> Value:
        """One field of a region's tuple, as a constant where it is the same on every way there."""
        made_by = region.node()
        if made_by.kind() == "prim::TupleConstruct":
            return made_by.inputsAt(index)
        if made_by.kind() == "prim::If":
            ways = [
                self._field(list(way.outputs())[region.offset()], index, way.returnNode())
                for way in made_by.blocks()
            ]
            if all(map(is_constant, ways)):
                first, second = map(constant, ways)
                if first == second:
                    return self._editor.constant_before(node, first)
        at = self._editor.constant_before(node, index)
        read = self._editor.node_before(node, "prim::TupleIndex", region, at)
        read.output().setType(_region_tuple().containedTypes()[index])
        return read.output()

    def _enter(self, node: Node, state: ProgramState) -> ProgramState:
        """The state inside a region; removes the node that begins it."""
        editor = self._editor
        region = node.inputsAt(0)
        device, dtype, enabled, cache = (self._field(region, i, node) for i in range(4))
        if state.outermost is None:
            self._entered += 1
            state = replace(state, outermost=self._entered)
        state = replace(state, cache_enabled=constant(cache) if is_constant(cache) else cache)
        names = [constant(device)] if is_constant(device) else list(state.devices)
        for name in names:
            if name not in state.devices:
                raise LoweringError(
                    "autocast",
                    f"device type {name!r} has no autocast in torch {torch.__version__}",
                    source=source_of(node),
                    advice="use one of " + ", ".join(state.devices),
                )
            inside = _validated(editor, node, name, dtype, enabled)
            if not is_constant(device):
                inside = _chosen(editor, node, name, device, inside, state.devices[name])
            state = state.with_device(name, inside)
        node.output().replaceAllUsesWith(region)
        node.destroy()
        return state


def _is_region(value: Value) -> bool:
    return region_class(value.type()) is not None or value.type() == _region_tuple()


_OTHERWISE = """
def otherwise(given: Optional[{type}], ambient: {type}) -> {type}:
    return ambient if given is None else given
"""

_IS_SUPPORTED = """
def is_supported(enabled: bool, dtype: int, supported: List[int]) -> bool:
    return enabled and dtype in supported
"""

_CHOOSE = """
def choose(device: str, name: str, inside: {type}, outside: {type}) -> {type}:
    return inside if device == name else outside
"""


def _validated(editor: Editor, node: Node, name: str, dtype: Value, enabled: Value) -> DeviceRegion:
    """The region's own state: a dtype that the device does not support disables it."""
    supported = supported_codes(name)
    if not is_constant(dtype):
        allowed = editor.shared_constant(("supported", name), list(supported))
        return DeviceRegion(editor.before(node, _IS_SUPPORTED, enabled, dtype, allowed), dtype)
    code = constant(dtype)
    if code in supported:
        return DeviceRegion(constant(enabled) if is_constant(enabled) else enabled, code)
    if not is_constant(enabled) or constant(enabled):
        names = dtypes_by_code()
        warnings.warn(
            f"In {name.upper()} autocast, but the target dtype {names[code]} is not supported. "
            "Disabling autocast.\n"
            f"{name.upper()} Autocast only supports dtypes of "
            + ", ".join(str(names[each]) for each in supported)
            + f" currently.\n  at {source_of(node)}",
            stacklevel=2,
        )
    return DeviceRegion(False, code)


def _chosen(
    editor: Editor,
    node: Node,
    name: str,
    device: Value,
    inside: DeviceRegion,
    outside: DeviceRegion,
) -> DeviceRegion:
    """The state of one device type in a region whose device is known while running."""
    this = editor.constant_before(node, name)

    def either(first: object, second: object, kind: str) -> Value:
        values = (queries.as_value(editor, node, each) for each in (first, second))
        return editor.before(node, _CHOOSE.format(type=kind), device, this, *values)

    return DeviceRegion(
        either(inside.enabled, outside.enabled, "bool"), either(inside.dtype, outside.dtype, "int")
    )
