"""A module's method as one flat graph, each operator with the submodule that it belongs to.

Calls are taken apart on a copy, outermost first, so that which module a callee belongs to is known
from the call. Torch's own inliner forgets it, and puts the casts of the JIT's autocast pass into
bodies that later calls share.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._state._python_cu``,
``torch._C.CompilationUnit.find_function``, ``torch._C._jit_try_infer_type``,
``torch._C.import_ir_module_from_buffer``, ``Node.prev``, and of the C++ module ``getattr``,
``hasattr``, ``_get_method`` and ``_method_names``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.jit._state import _python_cu

from amp_script.compute import CppModule
from amp_script.lowering._graph import (
    Block,
    Editor,
    Function,
    Graph,
    Node,
    Value,
    made_function,
    nodes_of,
)
from amp_script.lowering.functions import CALLS, name_of
from amp_script.lowering.helpers import PREFIX
from amp_script.lowering.regions import region_class
from amp_script.tracing.origins import submodule_of

__all__ = ["Flat", "cast_helper", "flatten"]

_C: Any = torch._C  # torch's stubs lack most of what is used here


@dataclass
class Flat:
    """A method without calls, as far as their bodies are known.

    Values are named by their numbers, which a graph never changes.

    Attributes:
        name: the method's.
        graph: the copy. It is not run, and keeps what a run would leave out.
        submodules: by the first result of a node the dotted name of the submodule that it belongs
            to; nodes of which that is not known are missing.
        attributes: the values that are attributes of modules, and which.
        in_regions: results of nodes inside autocast regions that are left to the JIT.
        gradient_paths: results of nodes that run only where gradients are recorded.
        helpers: bodies of the functions by which a lowered program casts; calls of them are left.
        unit: what those functions live in, which a graph does not keep.
    """

    name: str
    graph: Graph
    submodules: dict[int, str] = field(default_factory=dict)
    attributes: dict[int, object] = field(default_factory=dict)
    in_regions: set[int] = field(default_factory=set)
    gradient_paths: set[int] = field(default_factory=set)
    helpers: dict[str, Graph] = field(default_factory=dict)
    unit: object = None


def flatten(cpp_module: CppModule, *, is_lowered: bool = False) -> list[Flat]:
    """Return every method of a module as a flat graph; the module is left as it is.

    Args:
        cpp_module: the module.
        is_lowered: whether lowering may have put the bodies of small submodules into those of their
            callers. An operator there belongs to the submodule whose weights it takes, or else to
            the caller.
    """
    names = sorted(cpp_module._method_names(), key=lambda name: (name != "forward", name))
    flats = _flatten_all(cpp_module, names, is_lowered)
    if not is_lowered and any(flat.helpers for flat in flats):
        flats = _flatten_all(cpp_module, names, is_lowered=True)
    return flats


def _flatten_all(cpp_module: CppModule, names: Sequence[str], is_lowered: bool) -> list[Flat]:
    live = [_Flattening(cpp_module, name, None, is_lowered) for name in names]
    if not any(each.unresolved for each in live):
        return [each.flat for each in live]
    # A live module does not say where its functions are; a copy's are where it was put.
    unit = _C.CompilationUnit()
    try:
        archive = cpp_module.save_to_buffer()
        copied = _C.import_ir_module_from_buffer(unit, archive, None, {}, False)
    except RuntimeError:  # it calls Python, and what is missing stays so
        return [each.flat for each in live]
    return [_Flattening(copied, name, unit, is_lowered).flat for name in names]


@dataclass(frozen=True)
class _Place:
    """Where in the module a node is: in which submodule's method, and under which conditions."""

    path: str | None
    in_region: bool = False
    with_gradients: bool = False


class _Flattening:
    """Takes one method apart."""

    def __init__(self, cpp_module: CppModule, name: str, unit: Any, is_lowered: bool) -> None:
        graph = cpp_module._get_method(name).graph.copy()
        self.flat = Flat(name, graph, unit=unit)
        self.unresolved = False
        self._unit = unit
        self._is_lowered = is_lowered
        self._editor = Editor(graph)
        self._modules: dict[int, tuple[CppModule, str]] = {}
        self._bodies: list[str] = []
        self._owners: dict[int, str] = {}
        this = next(graph.inputs())
        self._modules[this.unique()] = (cpp_module, "")
        self._block(graph.block(), _Place("" if _has_structure(cpp_module, graph) else None))

    def _block(self, block: Block, place: _Place) -> None:
        self._run(list(block.nodes()), place)

    def _run(self, nodes: Sequence[Node], place: _Place) -> None:
        depth = 0
        for node in nodes:
            depth += _enters(node)
            self._node(node, replace(place, in_region=place.in_region or depth > 0))

    def _node(self, node: Node, place: _Place) -> None:
        if node.kind() == "prim::GetAttr":
            self._read(node)
        elif cast_helper(node) is not None:
            self._helper(node)
        elif node.kind() in CALLS:
            self._call(node, place)
            return
        elif node.kind() == "prim::fork" and node.hasAttribute("Subgraph"):
            self._fork(node, place)
            return
        self._note(node, place)
        for index, block in enumerate(node.blocks()):
            with_gradients = index == 0 and _asks_for_gradients(node)
            inside = replace(place, with_gradients=place.with_gradients or with_gradients)
            self._block(block, inside)

    def _note(self, node: Node, place: _Place) -> None:
        outputs = list(node.outputs())
        path = self._submodule(node, place)
        if outputs and path is not None:
            self.flat.submodules[outputs[0].unique()] = path
        if place.in_region:
            self.flat.in_regions.update(value.unique() for value in outputs)
        if place.with_gradients:
            self.flat.gradient_paths.update(value.unique() for value in outputs)

    def _submodule(self, node: Node, place: _Place) -> str | None:
        for find in (submodule_of, _scope, self._owner_of_weights):
            found = find(node)
            if found is not None:
                return found
        return place.path

    def _owner_of_weights(self, node: Node) -> str | None:
        if not self._is_lowered:
            return None
        taken = [value.unique() for value in node.inputs()]
        owners = {self._owners[key] for key in taken if key in self._owners}
        owner = owners.pop() if len(owners) == 1 else None
        if owner is not None and cast_helper(node) is not None:
            self._owners[node.output().unique()] = owner
        return owner

    def _read(self, node: Node) -> None:
        """Follow an attribute of a module that is known."""
        held = self._modules.get(node.inputsAt(0).unique())
        if held is None:
            return
        owner, path = held
        name = node.s("name")
        value = owner.getattr(name)
        result = node.output().unique()
        if isinstance(value, torch._C.ScriptModule):
            self._modules[result] = (value, f"{path}.{name}" if path else name)
        else:
            self.flat.attributes[result] = value
            self._owners[result] = path

    def _helper(self, node: Node) -> None:
        name = name_of(node)
        function = self._function(node, name)
        if function is None:
            self.unresolved = True
        else:
            self.flat.helpers[name] = function.graph

    def _call(self, node: Node, place: _Place) -> None:
        found = self._body(node)
        if found is None or name_of(node) in self._bodies:
            self._note(node, place)
            return
        body, path = found
        given = list(node.inputs())
        inputs = given if node.kind() == "prim::CallMethod" else given[1:]
        inside = place if path is None else replace(place, path=path)
        self._bodies.append(name_of(node))
        self._insert(node, body, inputs, list(node.outputs()), inside)
        self._bodies.pop()
        node.destroy()

    def _fork(self, node: Node, place: _Place) -> None:
        """Put what runs on another thread where it is waited for."""
        waits = [use.user for use in node.output().uses() if use.user.kind() == "aten::wait"]
        first = [wait.output() for wait in waits[:1]]
        for wait in waits[1:]:
            wait.output().replaceAllUsesWith(first[0])
        self._insert(node, node.g("Subgraph"), list(node.inputs()), first, place)

    def _insert(
        self,
        node: Node,
        body: Graph,
        inputs: Sequence[Value],
        results: Sequence[Value],
        place: _Place,
    ) -> None:
        marker = self._editor.node_before(node, "prim::Constant")
        made = self._editor.graph_before(node, body, inputs)
        for old, new in zip(results, made, strict=False):
            old.replaceAllUsesWith(new)
        inserted = list(_between(marker, node))
        marker.destroy()
        self._run(inserted, place)

    def _body(self, node: Node) -> tuple[Graph, str | None] | None:
        """What a call runs, and the submodule that it belongs to if that is another one."""
        name = name_of(node)
        if node.kind() == "prim::CallMethod":
            owner, path = self._modules.get(node.inputsAt(0).unique(), (None, ""))
            if owner is not None and owner._has_method(node.s("name")):
                return owner._get_method(node.s("name")).graph, path
            if region_class(node.inputsAt(0).type()) is not None:
                return None
        function = self._function(node, name)
        if function is None:
            self.unresolved = self.unresolved or node.kind() == "prim::CallFunction"
            return None
        # A lowered method is a function whose first argument is the module.
        first = next((value for value in list(node.inputs())[1:]), None)
        known = None if first is None else self._modules.get(first.unique())
        return function.graph, None if known is None else known[1]

    def _function(self, node: Node, name: str) -> Function | None:
        if self._unit is not None:
            found: Function | None = self._unit.find_function(name)
            return found
        called: Any = node.inputsAt(0).type()
        for candidate in (_python_cu.find_function(name), made_function(name)):
            if candidate is None:
                continue
            is_function = node.kind() == "prim::CallFunction"
            # Functions of other units may have the names of functions in these.
            if not is_function or _C._jit_try_infer_type(candidate).type() == called:
                return candidate
        return None


def cast_helper(node: Node) -> str | None:
    """The name of the function by which a lowered program casts, if the node calls one."""
    if node.kind() != "prim::CallFunction":
        return None
    name = name_of(node)
    if not name.startswith(PREFIX):
        return None
    short = name.rpartition(".")[2]
    return short if short.startswith("cast") else None


def _has_structure(cpp_module: CppModule, graph: Graph) -> bool:
    """Whether a node without a submodule's name belongs to the module itself.

    Freezing takes the structure away, and the module's mode with it. Scopes outlive it, until the
    module is saved.
    """
    return cpp_module.hasattr("training") or any(map(_scope, nodes_of(graph)))


def _scope(node: Node) -> str | None:
    """The submodule by the scope that torch's tracer gave a node of a live traced module."""
    scope = node.scopeName()
    if not scope:
        return None
    _, is_module, path = scope.rpartition("/")[2].partition(_SCOPE)
    return path if is_module else None


_SCOPE: Final = "__module."


def _asks_for_gradients(node: Node) -> bool:
    return node.kind() == "prim::If" and (node.inputsAt(0).node().kind() == "aten::is_grad_enabled")


def _enters(node: Node) -> int:
    """1 where an autocast region of the JIT's begins, on or off, and -1 where one ends."""
    step = {"prim::Enter": 1, "prim::Exit": -1}.get(node.kind(), 0)
    return step if step and region_class(node.inputsAt(0).type()) is not None else 0


def _between(first: Node, last: Node) -> Iterator[Node]:
    """The nodes after one and before another, in order."""
    found = []
    node = last.prev()
    while node != first:
        found.append(node)
        node = node.prev()
    return reversed(found)
