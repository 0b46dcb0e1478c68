"""Recording a model's run as the TorchScript method of a module.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._trace.TopLevelTracedModule``,
``torch.jit._recursive.create_script_module``, ``make_stub``, ``make_stubs_from_exported_methods``
and ``wrap_cpp_module``, ``torch.jit._state._python_cu``, ``torch._C._get_value_trace``,
``torch._C._freeze_module``, ``torch._C._jit_pass_inline``,
``torch._C._jit_pass_dce``, ``torch._C._jit_try_infer_type``, and of the C++ module
``_create_method_from_trace``, ``_define``, ``_register_attribute``, ``_get_method``,
``_has_method`` and ``hasattr``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.jit._state import _python_cu

from amp_script.errors import TracingError
from amp_script.lowering._graph import Graph, Value
from amp_script.lowering.composites.tracing import trace_composites

_C: Any = torch._C  # torch's stubs lack most of what is used here
_recursive: Any = torch.jit._recursive
_trace: Any = torch.jit._trace

__all__ = ["Recorder", "value_trace"]


class Recorder:
    """A TorchScript module whose methods come from runs of a model.

    Args:
        model: the module whose parameters, buffers and submodules the runs read, by their names.
        preserved: names of attributes that must exist on the recorded module, and of methods to
            compile by scripting, beside those that are exported.

    Attributes:
        compiled: names of the methods that were compiled by scripting.
    """

    def __init__(self, model: nn.Module, preserved: Sequence[str] = ()) -> None:
        methods = [name for name in preserved if inspect.ismethod(getattr(model, name, None))]
        self._module = _shell(model, methods)
        self.cpp_module: Any = self._module._c
        self.compiled = tuple(self.cpp_module._method_names())
        self._attached = 0
        for name in preserved:
            if name not in self.compiled and not self.cpp_module.hasattr(name):
                self._attach(name, model)

    def _attach(self, name: str, model: nn.Module) -> None:
        if not hasattr(model, name):
            raise TracingError(f"the model has no attribute {name!r} to preserve")
        value = getattr(model, name)
        inferred = _C._jit_try_infer_type(value)
        if not inferred.success():
            raise TracingError(f"attribute {name!r} cannot be preserved: {inferred.reason()}")
        self.cpp_module._register_attribute(name, inferred.type(), value)

    def attach_tensor(self, tensor: torch.Tensor) -> None:
        """Let the recording know a tensor that the model reads without having it registered."""
        self._attached += 1
        name = f"captured_{self._attached}"
        self.cpp_module._register_attribute(name, _C.TensorType.get(), tensor)

    def record(
        self,
        name: str,
        run: Callable[..., Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
    ) -> Graph:
        """Run a function and record what it did as a method.

        Args:
            name: the method's name.
            run: takes and returns flat tensors.
            inputs: what to run it with.

        Returns:
            The method's live graph, calls of scripted functions inlined; its first input is the
            module.
        """

        def traced(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(map(_recorded, run(*tensors)))

        with trace_composites():
            self.cpp_module._create_method_from_trace(
                name, traced, tuple(inputs), lambda value: "", True, False, [], False
            )
        graph = self.graph(name)
        _C._jit_pass_inline(graph)
        _C._jit_pass_dce(graph)
        return graph

    def define(self, source: str, names: Mapping[str, object]) -> None:
        """Compile a method from source text.

        Args:
            source: TorchScript source of a method.
            names: what global names in it stand for.
        """
        self.cpp_module._define(self._module._concrete_type, source, names.get)

    def graph(self, method: str) -> Graph:
        """The live graph of a method."""
        graph: Graph = self.cpp_module._get_method(method).graph
        return graph

    def freeze(self, preserved: Sequence[str]) -> torch.jit.ScriptModule:
        """Return a new module with attributes folded into constants, but the preserved ones."""
        cpp_module = _C._freeze_module(self.cpp_module, list(preserved))
        frozen: torch.jit.ScriptModule = _recursive.wrap_cpp_module(cpp_module)
        return frozen


def value_trace(tensor: torch.Tensor) -> Value:
    """The value that stands for a tensor in the graph being recorded; only while recording."""
    value: Value = _C._get_value_trace(tensor)
    return value


def _recorded(output: torch.Tensor) -> torch.Tensor:
    """Make an output that does not depend on the inputs part of the recording."""
    is_constant = value_trace(output).node().kind() == "prim::Constant"
    return output.clone() if is_constant else output


def _has_exports(model: nn.Module) -> bool:
    internal: Any = torch._jit_internal
    return bool(internal.module_has_exports(model))


def _shell(model: nn.Module, methods: Sequence[str]) -> torch.jit.ScriptModule:
    """The module without ``forward``: parameters, buffers and modules, and compiled methods."""
    shell: torch.jit.ScriptModule
    if not methods and not _has_exports(model):
        shell = _trace.TopLevelTracedModule(model, _compilation_unit=_python_cu)
        return shell

    def stubs(module: nn.Module) -> list[Any]:
        found: list[Any] = _recursive.make_stubs_from_exported_methods(module)
        known = {stub.original_method.__name__ for stub in found}
        wanted = [name for name in methods if name not in known] if module is model else []
        return found + [_recursive.make_stub(getattr(model, name), name) for name in wanted]

    shell = _recursive.create_script_module(model, stubs, share_types=False, is_tracing=True)
    return shell
