"""Recording a model's run as the TorchScript method of a module.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._recursive``
(``create_script_module``, ``make_stub``, ``make_stubs_from_exported_methods``,
``wrap_cpp_module``), ``torch._jit_internal.module_has_exports``,
``torch.utils._pytree.tree_leaves``, ``torch._C`` (``CompilationUnit``, ``ConcreteModuleType``,
``ScriptModule``, ``_freeze_module``, ``_jit_pass_inline``, ``_jit_pass_dce``,
``_jit_try_infer_type``), and of the C++ module ``_create_method_from_trace``, ``_define``,
``_register_attribute``, ``_get_method``, ``_method_names``, ``hasattr`` and ``setattr``; of a
``torch.ScriptObject`` ``_type``.
"""

from __future__ import annotations

import copy
import inspect
import keyword
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch._jit_internal
import torch.jit._recursive
from torch import nn
from torch.jit.frontend import FrontendError
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from amp_script.errors import TracingError
from amp_script.frozen import FrozenModule
from amp_script.lowering._graph import Editor, Graph, nodes_of
from amp_script.lowering.composites.tracing import trace_composites
from amp_script.lowering.functions import CALLS, name_of
from amp_script.scripting import LoweredModule
from amp_script.scripting.compilation import compiling
from amp_script.scripting.script_calls import lowered_script_calls
from amp_script.tracer import traced_graph, value_trace
from amp_script.tracing.gradient_paths import mark_gradient_paths, write_out_gradient_paths
from amp_script.tracing.origins import named_frames
from amp_script.untouched import tensors_of

_C: Any = torch._C  # torch's stubs lack most of what is used here
_recursive: Any = torch.jit._recursive

__all__ = ["Recorder", "insert_bodies", "tensors_with_grad"]


class Recorder:
    """A TorchScript module whose methods come from runs of a model.

    Args:
        model: the model; a function where it is no module.
        modules: modules that the runs read parameters and buffers of.
        preserved: names of attributes that the recorded module must have, and of methods to compile
            by scripting, beside those that are exported.

    Attributes:
        compiled: names of the methods that were compiled by scripting.
        preserved_tensors: tensors among the preserved attributes, which recordings read by name.

    Raises:
        TracingError: the model has no such attribute, or TorchScript no type for it.
    """

    def __init__(
        self, model: object, modules: Sequence[nn.Module], preserved: Sequence[str] = ()
    ) -> None:
        self._model = model
        scripted = isinstance(model, torch.jit.ScriptModule)
        methods = [name for name in preserved if inspect.ismethod(getattr(model, name, None))]
        if isinstance(model, nn.Module) and not scripted and (methods or _has_exports(model)):
            compiled = _compiled(model, methods)
            self.cpp_module: Any = compiled._c
            self._optional = _optional_tensors(compiled)
            held = [model]
        else:
            held = _scripted_parts(modules)
            self.cpp_module = _empty(type(model), held)
            self._optional = []
        if isinstance(model, torch.jit.ScriptModule):
            self._preserve_scripted(preserved, model)
        self.compiled = tuple(self.cpp_module._method_names())
        if "forward" in self.compiled:
            raise TracingError(
                "an exported method calls forward, which is recorded and not compiled; move what "
                "both need into a method of its own"
            )
        for name in preserved:
            if name not in self.compiled and not self.cpp_module.hasattr(name):
                self._preserve(name, model)
        values = (getattr(model, name) for name in preserved)
        self.preserved_tensors = [value for value in values if isinstance(value, torch.Tensor)]
        known = [*tensors_of(held), *self.preserved_tensors]
        self._attached = {id(tensor): tensor for tensor in known}
        for _, _, tensor in self._optional:
            self._attached.pop(id(tensor), None)
        self.attach(tensors_of(modules))
        for index, value in enumerate(_script_objects(modules)):
            self.cpp_module._register_attribute(f"object_{index}", value._type(), value)

    def _preserve_scripted(self, preserved: Sequence[str], model: torch.jit.ScriptModule) -> None:
        """Define methods that call those of a ScriptModule, which is a part of the recorded one."""
        methods: Any = model._c
        for name in preserved:
            if not methods._has_method(name):
                continue
            if isinstance(model, (FrozenModule, LoweredModule)):
                raise TracingError(
                    f"method {name!r} of a {type(model).__name__} cannot be preserved, because its "
                    "casts are made already; preserve it when freezing the model from before"
                )
            self.define(_call_of_part(methods._get_method(name).schema), _TYPE_NAMES)

    def attach(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the recording know tensors that it may read; each once, however often it is given."""
        for tensor in tensors:
            if id(tensor) not in self._attached:
                name = f"tensor_{len(self._attached)}"
                self._attached[id(tensor)] = tensor
                self.cpp_module._register_attribute(name, _C.TensorType.get(), tensor)

    def _preserve(self, name: str, model: object) -> None:
        if not hasattr(model, name):
            raise TracingError(f"the model has no attribute {name!r} to preserve")
        value = getattr(model, name)
        inferred = _C._jit_try_infer_type(value)
        if not inferred.success():
            raise TracingError(f"attribute {name!r} cannot be preserved: {inferred.reason()}")
        self.cpp_module._register_attribute(name, inferred.type(), value)

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
            outputs = tuple(map(_recorded, run(*tensors)))
            mark_composites()
            mark_gradient_paths(traced_graph())
            return outputs

        with (
            self._optional_aside(),
            trace_composites() as mark_composites,
            lowered_script_calls() as scripted,
            named_frames(self._model),
        ):
            self.cpp_module._create_method_from_trace(
                name, traced, tuple(inputs), lambda value: "", True, False, [], False
            )
            graph = self.graph(name)
            insert_bodies(graph, scripted.graph)
            _C._jit_pass_inline(graph)
        write_out_gradient_paths(graph)
        _C._jit_pass_dce(graph)
        return graph

    @contextmanager
    def _optional_aside(self) -> Iterator[None]:
        """Inside the block, tensors that have optional attributes are recorded as attached ones."""
        for owner, name, _ in self._optional:
            owner.setattr(name, None)
        try:
            yield
        finally:
            for owner, name, tensor in self._optional:
                owner.setattr(name, tensor)

    def define(self, source: str, names: Mapping[str, object]) -> None:
        """Compile a method from source text; what it calls of the recorded methods is inlined.

        Args:
            source: TorchScript source of a method.
            names: what global names in it stand for.
        """
        before = set(self.cpp_module._method_names())
        concrete_type = _C.ConcreteModuleType.from_jit_type(self.cpp_module._type())
        self.cpp_module._define(concrete_type, source, names.get)
        (defined,) = set(self.cpp_module._method_names()) - before
        type_name = self.cpp_module._type().qualified_name()
        bodies = {f"{type_name}.{name}": self.graph(name) for name in before}
        insert_bodies(self.graph(defined), bodies.get)

    def graph(self, method: str) -> Graph:
        """The live graph of a method."""
        graph: Graph = self.cpp_module._get_method(method).graph
        return graph

    def freeze(self, preserved: Sequence[str]) -> torch.jit.ScriptModule:
        """Return a new module with attributes folded into constants, but the preserved ones."""
        # The copy has attributes of its own, which a program that changes them must not share.
        cpp_module = copy.deepcopy(_C._freeze_module(self.cpp_module, list(preserved)))
        for name in filter(cpp_module.hasattr, preserved):
            value = cpp_module.getattr(name)
            if isinstance(value, torch.Tensor):  # torch's copy hands gradients on to the original
                cpp_module.setattr(name, value.detach().requires_grad_(value.requires_grad))
        frozen: torch.jit.ScriptModule = _recursive.wrap_cpp_module(cpp_module)
        return frozen


def insert_bodies(graph: Graph, body_of: Callable[[str], Graph | None]) -> None:
    """Put bodies in the place of calls.

    Torch's own inliner notes at each node which function it comes from, by address, and freezing
    deletes functions; the first error in such a node is then a segmentation fault.

    Args:
        graph: changed in place.
        body_of: the body of a function or method by qualified name, None to leave the call.
    """
    editor = Editor(graph)
    for node in nodes_of(graph):
        if node.kind() not in CALLS:
            continue
        body = body_of(name_of(node))
        if body is not None:
            given = list(node.inputs())
            inputs = given if node.kind() == "prim::CallMethod" else given[1:]
            (result,) = editor.graph_before(node, body, inputs)
            node.output().replaceAllUsesWith(result)
            node.destroy()


def _recorded(output: torch.Tensor) -> torch.Tensor:
    """Make an output that does not depend on the inputs part of the recording."""
    is_constant = value_trace(output).node().kind() == "prim::Constant"
    return output.clone() if is_constant else output


def _has_exports(model: nn.Module) -> bool:
    internal: Any = torch._jit_internal
    return bool(internal.module_has_exports(model))


def _compiled(model: nn.Module, methods: Sequence[str]) -> torch.jit.ScriptModule:
    """The model with its exported methods and those named, and without ``forward``."""

    def stubs(module: nn.Module) -> list[Any]:
        found: list[Any] = _recursive.make_stubs_from_exported_methods(module)
        known = {stub.original_method.__name__ for stub in found}
        wanted = [name for name in methods if name not in known] if module is model else []
        return found + [_recursive.make_stub(getattr(module, name), name) for name in wanted]

    module: torch.jit.ScriptModule
    try:
        with compiling():
            module = _recursive.create_script_module(
                model, stubs, share_types=False, is_tracing=True
            )
    except (FrontendError, RuntimeError) as error:
        asked = f" ({', '.join(methods)})" if methods else ""
        raise TracingError(
            f"TorchScript cannot compile what {type(model).__name__} exports or preserves{asked}; "
            f"preserve what it reads instead, or leave it out: {error}"
        ) from error
    return module


def _call_of_part(schema: torch._C.FunctionSchema) -> str:
    """Source of a method that calls the method of this schema of the first scripted part."""
    arguments = schema.arguments[1:]
    typed: Any = [
        f"{argument.name}: {argument.type.annotation_str}"
        + (f" = {argument.default_value!r}" if argument.has_default_value() else "")
        for argument in arguments
    ]
    names = ", ".join(argument.name for argument in arguments)
    return (
        f"def {schema.name}({', '.join(['self', *typed])}):\n"
        f"    return self.scripted_0.{schema.name}({names})\n"
    )


_TYPE_NAMES: Mapping[str, object] = {
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Optional", "Tuple")},
    "Tensor": torch.Tensor,
    "Future": torch.jit.Future,
    "Union": typing.Union,
}
"""What the names in the text of a TorchScript type stand for."""


def _optional_tensors(module: torch.jit.ScriptModule) -> list[tuple[Any, str, torch.Tensor]]:
    """Tensors whose attributes are typed ``Optional[Tensor]``, which no recorded operator can read.

    Returns:
        For each the C++ module that has it, its name, and the tensor.
    """
    return [
        (part._c, name, tensor)
        for part in module.modules()
        if isinstance(part, torch.jit.ScriptModule)
        for name, (kind, _) in part._concrete_type.get_attributes().items()
        if kind.kind() == "OptionalType" and isinstance(tensor := getattr(part, name), torch.Tensor)
    ]


def _empty(named_after: type, parts: Sequence[Any]) -> Any:
    """A C++ module without methods that holds scripted modules, for calls of them.

    It has a compilation unit of its own, which dies with it and with what is frozen of it. In the
    process's, each recording would stay for ever, with the constants of each frozen program.
    """
    name = named_after.__name__
    readable = name.isidentifier() and name.isascii() and not keyword.iskeyword(name)
    name = f"__torch__.{name if readable else 'Model'}"  # a file's code has no other names
    module = _C.ScriptModule(name, _C.CompilationUnit(), False)
    module._register_attribute("training", _C.BoolType.get(), False)
    for index, part in enumerate(parts):
        module._register_attribute(f"scripted_{index}", part._c._type(), part)
    return module


def _scripted_parts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """The outermost ScriptModules in modules, each once."""
    found: dict[nn.Module, None] = {}
    pending = list(modules)
    while pending:
        part = pending.pop()
        if isinstance(part, torch.jit.ScriptModule):
            found[part] = None
        else:
            pending.extend(part.children())
    return list(found)


def _script_objects(modules: Iterable[nn.Module]) -> list[Any]:
    """Objects of C++ that modules hold, such as the packed weights of quantised layers."""
    return [
        value
        for module in modules
        for part in module.modules()
        for value in vars(part).values()
        # The C++ module that a ScriptModule stands for is one too, and holds its own.
        if isinstance(value, torch.ScriptObject) and not isinstance(value, torch._C.ScriptModule)
    ]


class _WithGrad(TorchFunctionMode):
    """Collects the tensors requiring gradients that functions are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.requires_grad:
                self.found.setdefault(id(value), value)
        return func(*args, **(kwargs or {}))


def tensors_with_grad(run: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors requiring gradients that a run reads, wherever it has them from."""
    collector = _WithGrad()
    with torch.no_grad(), collector:
        run()
    return list(collector.found.values())
