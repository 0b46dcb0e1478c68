"""A frozen module's methods under a compute plan.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._create_function_from_graph``,
``ScriptFunction._set_ignore_amp``, the C++ module's ``_method_names`` and ``_get_method``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final, TypeAlias

import torch

from amp_script.lowering._graph import Editor, Graph, Node, nodes_of
from amp_script.metadata import InputSpec

from .constants import PackedWeight, StoredConstants, fold_casts
from .packing import Packing
from .plans import Plan
from .prepack import prepack, weighted_inputs
from .sizes import sizes_on_examples
from .upcast import upcast

__all__ = ["CppModule", "Program", "bake"]

CppModule: TypeAlias = Any
"""A ``torch._C.ScriptModule``: torch's stub for the class lacks most of its methods."""


class Program:
    """Runs a module's methods with some kinds of operator in float32.

    The module's own graphs stay as they were stored, except that constants which only the plan
    uses are out of them.

    Args:
        cpp_module: a frozen module whose methods have not run yet.
        inputs: specs of ``forward``'s inputs.
        plan: which operators to run in float32.

    Attributes:
        plan: the plan that was asked for.
        changed: how many operators the plan runs in float32; with none, no constant is taken out.
    """

    def __init__(
        self,
        cpp_module: CppModule,
        inputs: Sequence[InputSpec],
        plan: Plan,
    ) -> None:
        self.plan = plan
        self._inputs = inputs
        stored = _graphs_of(cpp_module)
        graphs = {name: graph.copy() for name, graph in stored.items()}
        if plan.name == "packed":
            graphs |= _one_for_each_grad_mode(graphs.get("forward"))
        changed = _upcast_all(graphs, inputs, plan)
        self.changed = sum(map(len, changed.values()))
        self._stored = StoredConstants(stored.values())
        packings: dict[str, list[str]] = {}
        for name in (_FORWARD, _WITH_GRAD) if plan.name == "packed" else ():
            if changed.get(name):
                names = weighted_inputs(graphs[name], changed[name])
                sizes = sizes_on_examples(graphs[name], cpp_module, inputs, names)
                packings[name] = prepack(graphs[name], changed[name], sizes)
        packed = fold_casts(graphs, self._stored) if self.changed else {}
        self._functions = {
            name: _Function(name, graph, [packed[name, key] for key in packings.get(name, ())])
            for name, graph in graphs.items()
        }

    def passes_gradients(self, name: str) -> bool:
        """Whether gradients pass a method: packed kernels have no derivatives, and say nothing."""
        return not self._function(name).has_packed_kernels

    def unpacked(self, cpp_module: CppModule) -> Program:
        """The same program in plain float32 kernels, with weights of its own."""
        return Program(cpp_module, self._inputs, replace(self.plan, name="upcast"))

    def run(self, cpp_module: CppModule, name: str, arguments: Sequence[Any]) -> Any:
        """Call a method with all its arguments by position."""
        return self._function(name)(cpp_module, arguments)

    def _function(self, name: str) -> _Function:
        with_grad = name == _FORWARD and torch.is_grad_enabled()
        return self._functions.get(_WITH_GRAD if with_grad else name, self._functions[name])

    def whole(self) -> AbstractContextManager[None]:
        """A context in which the module's own graphs have all their constants."""
        return self._stored.whole()

    def give_back(self) -> None:
        """Leave the module's own graphs all their constants from now on."""
        self._stored.give_back()


def bake(cpp_module: CppModule, inputs: Sequence[InputSpec], plan: Plan) -> None:
    """Write a plan into a module's own graphs, weights in float32.

    Args:
        cpp_module: a frozen module whose methods have not run yet.
        inputs: specs of ``forward``'s inputs.
        plan: which operators to run in float32; it must not be a packed one.
    """
    graphs = _graphs_of(cpp_module)
    _upcast_all(graphs, inputs, plan)
    fold_casts(graphs, None)


def _upcast_all(
    graphs: Mapping[str, Graph], inputs: Sequence[InputSpec], plan: Plan
) -> dict[str, set[str]]:
    """Run the upcast pass on the graph of each method; returns what changed in each."""
    dtypes = {spec.name: spec.dtype for spec in inputs if spec.dtype is not None}
    return {
        name: upcast(graph, dtypes if name == "forward" else {}, plan.kinds)
        for name, graph in graphs.items()
    }


def _one_for_each_grad_mode(forward: Graph | None) -> dict[str, Graph]:
    """Take apart a program that asks first of all whether gradients are on: sizes inside a branch
    are not known, and without them nothing is packed.
    """
    if forward is None or not any(map(_decides, forward.nodes())):
        return {}
    if any(n.kind() in ("prim::Enter", "aten::set_grad_enabled") for n in nodes_of(forward)):
        return {}
    graphs = {_FORWARD: forward, _WITH_GRAD: forward.copy()}
    for name, graph in graphs.items():
        editor = Editor(graph)
        for node in nodes_of(graph):
            if _decides(node):
                known = editor.constant_before(node, name == _WITH_GRAD)
                node.output().replaceAllUsesWith(known)
        torch._C._jit_pass_constant_propagation(graph)
        torch._C._jit_pass_dce(graph)
    return graphs


def _decides(node: Node) -> bool:
    """Whether a node asks about gradients for more than a copy, which asks to stay unfolded."""
    asks = node.kind() == "aten::is_grad_enabled"
    return asks and any(use.user.kind() != "aten::_to_copy" for use in node.output().uses())


_FORWARD: Final = "forward"
_WITH_GRAD: Final = "forward_with_grad"
"""The graph that ``forward`` runs while gradients are on, where that is another one."""


def _graphs_of(cpp_module: CppModule) -> dict[str, Graph]:
    return {name: cpp_module._get_method(name).graph for name in cpp_module._method_names()}


class _Function:
    """A graph as a function; it takes the module only where it reads an attribute."""

    def __init__(self, name: str, graph: Graph, weights: Sequence[PackedWeight]) -> None:
        module = next(graph.inputs())
        self._takes_module = bool(module.uses())
        self._packing = Packing(weights) if weights else None
        self.has_packed_kernels = any(n.kind().startswith("mkldnn::_") for n in nodes_of(graph))
        if not self._takes_module:
            graph.eraseInput(0)
        function: Any = torch._C._create_function_from_graph(name, graph)
        function._set_ignore_amp(True)
        self._function = function

    def __call__(self, cpp_module: CppModule, arguments: Sequence[Any]) -> Any:
        before = [cpp_module] if self._takes_module else []
        if self._packing is None:
            return self._function(*before, *arguments)
        result, sizes = self._function(*before, *arguments, *self._packing.inputs())
        self._packing.saw(sizes)
        return result
