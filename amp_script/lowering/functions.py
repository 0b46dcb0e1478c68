"""What programs call: bodies as they were compiled, and lowered copies of them.

A graph is lowered one function at a time. A call stays a call, of a copy of the callee that is
lowered for the autocast state at the call; each callee is lowered once for each state, however
often it is called, which keeps lowering fast and saved code readable. Small callees are inlined
first, so that what is known about a value's dtype and casts is not lost at every layer.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._state._python_cu``,
``torch._C.CompilationUnit.find_function``, ``torch._C._jit_pass_inline``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.jit._state import _python_cu

from ..errors import LoweringError
from ..jit_state import jit_autocast_pass, shield
from ._graph import (
    Editor,
    Function,
    Graph,
    Node,
    Type,
    constant,
    create_function,
    is_constant,
    is_none,
    nodes_of,
    source_of,
)
from .cleanup import fold
from .helpers import PREFIX
from .regions import ARGUMENT_NAMES, is_region_constructor, region_class
from .state import OFF, Entry

_SMALL = 24
"""A callee of at most so many nodes is inlined."""

CALLS = frozenset({"prim::CallMethod", "prim::CallFunction"})

_LOOKED_AT = (*CALLS, "prim::Enter", "prim::fork", "prim::PythonOp")

Lower = Callable[[Graph, Entry, "Functions"], None]


@dataclass(frozen=True)
class Contents:
    """What a function does, in all that it calls.

    Attributes:
        schemas: the operators, each as the text of its schema.
        regions: device type and number of the dtype of each autocast region, None for the device's
            own; a region about which this is not known is two Nones.
        leaves: whether it calls Python, or what is known only while running.
        forks: whether it forks.
    """

    schemas: frozenset[str]
    regions: frozenset[tuple[str | None, int | None]]
    leaves: bool
    forks: bool

    @property
    def has_regions(self) -> bool:
        """Whether there is an autocast region."""
        return bool(self.regions)

    def has_several_dtypes(self, entry: Entry) -> bool:
        """Whether autocast may have more than one dtype, when it is called in a state."""
        own = {name: dtype for name, _, dtype in entry.devices}
        dtypes = {target for _, target, _ in entry.devices if target != OFF}
        for device_type, dtype in self.regions:
            dtypes.add(own.get(device_type or "") if dtype is None else dtype)
        return len(dtypes) > 1 or None in dtypes


class Functions:
    """The functions and methods that programs call, by qualified name.

    Args:
        lower: lowers a graph in place for a state.
        unit: where to look bodies up; by default, where everything compiled in this process is.
    """

    def __init__(self, lower: Lower, unit: torch._C.CompilationUnit | None = None) -> None:
        self._foreign: dict[str, list[tuple[Type, Functions]]] = {}
        self._lower = lower
        self._unit = _python_cu if unit is None else unit
        self._prepared: dict[str, Graph] = {}
        self._inlined: dict[str, bool] = {}
        self._contents: dict[str, Contents] = {}
        self._lowered: dict[tuple[str, Entry], Function] = {}

    def graph_named(self, name: str) -> Graph | None:
        """The body of a function or method as it was compiled; None if unknown."""
        function = self._unit.find_function(name)
        return None if function is None else function.graph

    def is_lowered_itself(self, name: str, entry: Entry) -> bool:
        """Whether the function or method itself is lowered for calls in a state, not a copy."""
        return False

    def prepare(self, graph: Graph) -> None:
        """Inline small callees into a graph, in place, and fold what is constant."""
        self._inline(graph, self.prepared, self._is_inlined)

    def prepared(self, name: str) -> Graph | None:
        """The body of a function or method after :meth:`prepare`; not to be changed."""
        if name not in self._prepared:
            source = self.graph_named(name)
            if source is None:
                return None
            body = copy_of(name, source)
            self.prepare(body)
            self._prepared[name] = body
        return self._prepared[name]

    def inlined(self, name: str) -> Graph | None:
        """The body of a function or method with the bodies of all that it calls in it."""
        source = self.graph_named(name)
        if source is None:
            return None
        body = copy_of(name, source)
        self._inline(body, self.inlined, lambda _: True)
        return body

    def _is_inlined(self, name: str) -> bool:
        if name not in self._inlined:
            body = self.prepared(name)
            self._inlined[name] = body is not None and (_must_be_inlined(body) or _is_small(body))
        return self._inlined[name]

    def _inline(
        self, graph: Graph, body_of: Callable[[str], Graph | None], wanted: Callable[[str], bool]
    ) -> None:
        with shield(), jit_autocast_pass(False):
            editor = Editor(graph)
            unknown = False
            for node in (node for kind in CALLS for node in graph.findAllNodes(kind)):
                if is_region_constructor(node):
                    unknown = not self._name_arguments(node) or unknown
                    continue
                name = name_of(node)
                foreign = self._foreign_to(node)
                body = foreign.inlined(name) if foreign else body_of(name)
                if body is None:
                    unknown = unknown or not is_interface_call(node)
                elif foreign or wanted(name):
                    _inline_call(editor, node, body)
            if unknown:
                torch._C._jit_pass_inline(graph)
            fold(graph)

    def _name_arguments(self, node: Node) -> bool:
        """Write the names of a region's arguments to the node that makes it, if they are known."""
        if not node.hasAttribute(ARGUMENT_NAMES):
            graph = self.graph_named(name_of(node))
            if graph is None:
                return False
            names = [value.debugName().partition(".")[0] for value in graph.inputs()]
            node.ss_(ARGUMENT_NAMES, names)
        return True

    def learn(self, module: torch._C.ScriptModule, functions: Functions | None = None) -> None:
        """Learn the bodies of methods that may be in another compilation unit.

        Types of other units may have the names of types in this one.

        Args:
            module: the methods are its own and those of the modules in it.
            functions: who knows the unit; by default, only the methods themselves are known.
        """
        functions = functions or _MethodsOf(self._lower, module)
        if functions is not self:
            kind: Any = module._type()
            self._foreign.setdefault(kind.qualified_name(), []).append((kind, functions))
        for _, child in torch._C.ModuleDict(module).items():
            self.learn(child, functions)

    def _foreign_to(self, node: Node) -> Functions | None:
        if node.kind() == "prim::CallMethod" and not is_interface_call(node):
            called: Any = node.inputsAt(0).type()
            for kind, functions in self._foreign.get(called.qualified_name(), ()):
                if kind == called:
                    return functions
        return None

    def contents(self, name: str) -> Contents:
        """What a function or method does, in all that it calls."""
        if name not in self._contents:
            body = self.prepared(name)
            assert body is not None
            self._contents[name] = self.contents_of(body)
        return self._contents[name]

    def contents_of(self, graph: Graph) -> Contents:
        """What a prepared graph does, in all that it calls."""
        kinds = {kind: graph.findAllNodes(kind) for kind in _LOOKED_AT}
        calls = [node for kind in CALLS for node in kinds[kind]]
        made = [node for node in calls if is_region_constructor(node)]
        unknown = [node for node in calls if is_interface_call(node)]
        entered = [node.inputsAt(0).type() for node in kinds["prim::Enter"]]
        called = [
            *(self.contents_of(node.g("Subgraph")) for node in kinds["prim::fork"]),
            *(
                self.contents(name_of(node))
                for node in calls
                if node not in made and node not in unknown
            ),
        ]
        schemas = {node.schema() for node in nodes_of(graph) if node.kind()[:6] != "prim::"}
        return Contents(
            schemas=frozenset(schemas.union(*(each.schemas for each in called))),
            regions=frozenset(map(_region, made)).union(
                *(each.regions for each in called),
                {(None, None)} if any(map(region_class, entered)) and not made else (),
            ),
            leaves=bool(unknown or kinds["prim::PythonOp"]) or any(each.leaves for each in called),
            forks=bool(kinds["prim::fork"]) or any(each.forks for each in called),
        )

    def lowered(self, name: str, entry: Entry) -> Function:
        """A copy of a function or method, lowered for calls in a state.

        It takes the arguments of the original, a method's own object first, and then those that
        the state is made of.
        """
        key = (name, entry)
        if key not in self._lowered:
            body = self.prepared(name)
            assert body is not None
            copy = body.copy()
            self.lower(copy, entry)
            self._lowered[key] = lowered_function(name, copy)
        return self._lowered[key]

    def lower(self, graph: Graph, entry: Entry) -> None:
        """Lower a graph that :meth:`prepare` has been through, in place, for calls in a state."""
        self._lower(graph, entry, self)


class _MethodsOf(Functions):
    """The methods of one module and of the modules in it, by qualified name."""

    def __init__(self, lower: Lower, module: torch._C.ScriptModule) -> None:
        super().__init__(lower)
        self._methods: dict[str, Graph] = {}
        pending = [module]
        while pending:
            each = pending.pop()
            for name in each._method_names():
                method = f"{_type_name(each)}.{name}"
                self._methods[method] = each._get_method(name).graph
            pending.extend(child for _, child in torch._C.ModuleDict(each).items())

    def graph_named(self, name: str) -> Graph | None:
        return self._methods.get(name)


def _region(made: Node) -> tuple[str | None, int | None]:
    """Device type and dtype of the region that a constructor makes, as in :class:`Contents`."""
    given = dict(zip(made.ss(ARGUMENT_NAMES), made.inputs(), strict=True))
    device, dtype = given.get("device_type"), given.get("dtype")
    if device is None or not is_constant(device):
        return None, None
    if dtype is None or is_none(dtype):
        return constant(device), None
    return (constant(device), constant(dtype)) if is_constant(dtype) else (None, None)


def copy_of(name: str, graph: Graph) -> Graph:
    """Copy what was compiled, which cannot be done to what plain TorchScript got wrong."""
    try:
        copy: Graph = graph.copy()
    except RuntimeError as error:
        if "not in scope" not in str(error):
            raise
        regions = graph.findAllNodes("prim::Enter")
        raise LoweringError(
            name,
            "plain torch.jit.script compiled it before, and an early exit inside a with block so "
            "that what follows is used outside of the branch it is in",
            source=source_of(regions[0].inputsAt(0).node()) if regions else "",
            advice="compile it with amp_script.script first, or put what follows the exit into an "
            "else",
        ) from error
    return copy


def _type_name(module: Any) -> str:
    return str(module._type().qualified_name())


def lowered_function(name: str, graph: Graph) -> Function:
    """Make a function of a lowered graph, named after the original.

    It lives as long as the process: graphs refer to functions without keeping them.
    """
    short = "_".join(name.split(".")[-2:])
    number = _numbers[short]
    _numbers[short] += 1
    return create_function(f"{PREFIX}lowered.{short}_{number}", graph)


_numbers: Counter[str] = Counter()


def name_of(node: Node) -> str:
    """The qualified name of what a call node calls."""
    called: Any = node.inputsAt(0).type()
    if node.kind() == "prim::CallFunction":
        return str(called.annotation_str)
    if is_interface_call(node):
        return f"{called.annotation_str}.{node.s('name')}"
    return f"{called.qualified_name()}.{node.s('name')}"


def is_interface_call(node: Node) -> bool:
    """Whether the body of the callee is known only while running."""
    return node.kind() == "prim::CallMethod" and bool(
        node.inputsAt(0).type().kind() == "InterfaceType"
    )


def _inline_call(editor: Editor, node: Node, body: Graph) -> None:
    """Put the body of what a node calls in the place of the call."""
    given = list(node.inputs())
    inputs = given if node.kind() == "prim::CallMethod" else given[1:]
    for old, new in zip(node.outputs(), editor.graph_before(node, body, inputs), strict=True):
        old.replaceAllUsesWith(new)
    node.destroy()


def _is_small(graph: Graph) -> bool:
    return len(list(graph.nodes())) <= _SMALL and len(nodes_of(graph)) <= _SMALL


def _must_be_inlined(graph: Graph) -> bool:
    """Whether a region or an interface is among the arguments or results."""
    kinds = [value.type() for value in (*graph.inputs(), *graph.outputs())]
    return any(
        kind.kind() == "InterfaceType" or "autocast_mode" in kind.annotation_str for kind in kinds
    )
