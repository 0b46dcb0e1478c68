"""Running a model as if it had not run: its state, and the random generators, come back.

A forward may count its calls in a buffer, cache a table on the module, or draw random numbers.
Tracing and verifying run it several times, and none of that is the caller's business.

Private names used here, present in torch 2.6 to 2.15: the C++ module's ``_get_method``,
``_method_names``, ``hasattr``, ``getattr`` and ``setattr``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from amp_script.errors import TracingError

__all__ = ["State", "generators_kept", "modules_of", "seeded", "tensors_of", "untouched"]

_Container: TypeAlias = "list[object] | dict[object, object] | set[object]"


def modules_of(model: object) -> list[nn.Module]:
    """The modules that a callable runs, as far as it can be seen from outside."""
    if isinstance(model, nn.Module):
        return [model]
    if isinstance(model, functools.partial):
        held = [model.func, *model.args, *model.keywords.values()]
    else:
        cells = [cell.cell_contents for cell in getattr(model, "__closure__", None) or ()]
        held = [*cells, getattr(model, "__self__", None), *getattr(model, "__dict__", {}).values()]
    found = [value for value in held if isinstance(value, nn.Module)]
    deeper = [value for value in held if isinstance(value, (FunctionType, functools.partial))]
    return found + [module for value in deeper for module in modules_of(value)]


def tensors_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """All parameters and buffers of modules."""
    return [t for m in modules for t in (*m.parameters(), *m.buffers())]


@contextmanager
def untouched(modules: Iterable[nn.Module]) -> Iterator[State]:
    """Put back every attribute, buffer, hook and flag of the modules when the block is left.

    Buffers and other tensors among the attributes get their values back; so do lists, dictionaries
    and sets, one level deep.

    Args:
        modules: each with all modules inside it.

    Raises:
        TracingError: a parameter was changed in place, which is too large to keep a copy of.
    """
    parts = dict.fromkeys(part for module in modules for part in module.modules())
    state = State([_Saved.of(part) for part in parts])
    try:
        yield state
    finally:
        for saved in state.saved:
            saved.restore()
    for saved in state.saved:
        saved.require_parameters_unchanged()


@dataclass(frozen=True)
class State:
    """What modules held before the block."""

    saved: list[_Saved]

    def changed(self) -> bool:
        """Whether a tensor or attribute is no longer what it was."""
        return any(saved.changed() for saved in self.saved)

    def changed_tensors(self) -> list[torch.Tensor]:
        """The tensors that were changed in place."""
        return [tensor for saved in self.saved for tensor, _ in saved.changed_tensors()]

    def rebound_names(self) -> list[str]:
        """Attributes that hold other objects than before, such as ``"Counter.calls"``."""
        return [name for saved in self.saved for name in saved.rebound_names()]


_REGISTERED: Final = ("_buffers", "_parameters", "_modules")
"""Where torch keeps a module's tensors and submodules, which look like attributes to its users."""


@dataclass(frozen=True)
class _Saved:
    """What one module holds, without the modules inside it."""

    module: nn.Module
    attributes: dict[str, object]
    script_attributes: dict[str, object]
    containers: list[tuple[_Container, _Container]]
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    parameters: list[tuple[str, torch.Tensor, int | torch.Tensor]]

    @classmethod
    def of(cls, module: nn.Module) -> _Saved:
        attributes = dict(vars(module))
        containers = [
            (value, value.copy())
            for value in attributes.values()
            if isinstance(value, (list, dict, set))
        ]
        tensors = [value for value in attributes.values() if isinstance(value, torch.Tensor)]
        tensors += [buffer for _, buffer in module.named_buffers(recurse=False)]
        script_attributes = _script_attributes(module)
        tensors += [v for v in script_attributes.values() if isinstance(v, torch.Tensor)]
        return cls(
            module,
            attributes,
            script_attributes,
            containers,
            [(tensor, tensor.detach().clone()) for tensor in tensors],
            [(name, p, _values_or_count(p)) for name, p in module.named_parameters(recurse=False)],
        )

    def changed(self) -> bool:
        return (
            bool(self._rebound())
            or any(_differ(container, copy) for container, copy in self.containers)
            or bool(self.changed_tensors())
            or bool(self._rebound_script_attributes())
        )

    def changed_tensors(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors with the values that they had; torch's count of changes misses some kernels."""
        return [(tensor, values) for tensor, values in self.tensors if not tensor.equal(values)]

    def _rebound_script_attributes(self) -> list[str]:
        return [
            name
            for name, value in self.script_attributes.items()
            if not _is_still(_cpp_module(self.module).getattr(name), value)
        ]

    def rebound_names(self) -> list[str]:
        names = [*self._rebound(), *self._rebound_script_attributes()]
        for container, copy in self.containers:
            if _differ(container, copy):
                name = next(name for name, held in self.attributes.items() if held is container)
                if name in _REGISTERED and isinstance(container, dict) and isinstance(copy, dict):
                    names += _changed_keys(copy, container)
                else:
                    names.append(name)
        return [f"{type(self.module).__name__}.{name}" for name in names]

    def _rebound(self) -> list[str]:
        return _changed_keys(self.attributes, vars(self.module))

    def restore(self) -> None:
        if self._rebound():
            now = vars(self.module)
            now.clear()
            now.update(self.attributes)
        for container, copy in self.containers:
            _refill(container, copy)
        for name in self._rebound_script_attributes():
            _cpp_module(self.module).setattr(name, self.script_attributes[name])
        for tensor, values in self.changed_tensors():
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(values)

    def require_parameters_unchanged(self) -> None:
        for name, parameter, before in self.parameters:
            if isinstance(before, torch.Tensor):
                same = parameter.isclose(before, rtol=0, atol=0, equal_nan=True)
                unchanged = bool(same.all())
            else:
                unchanged = parameter._version == before
            if not unchanged:
                raise TracingError(
                    f"the model changes its parameter {name!r} of {type(self.module).__name__} in "
                    "place when it runs; make it a buffer, or change a copy"
                )


def _values_or_count(parameter: torch.Tensor) -> torch.Tensor | int:
    """Torch's count of a parameter's changes or, where it has none, a copy."""
    return parameter.detach().clone() if parameter.is_inference() else parameter._version


def _cpp_module(module: nn.Module) -> Any:
    """A script module's C++ module, of which torch's stubs lack most."""
    return module._c


def _script_attributes(module: nn.Module) -> dict[str, object]:
    """The attributes of a ScriptModule that its methods name, but parameters and modules."""
    if not isinstance(module, torch.jit.ScriptModule):
        return {}
    cpp_module = _cpp_module(module)
    graphs = [cpp_module._get_method(name).graph for name in cpp_module._method_names()]
    names = {
        node.s("name")
        for graph in graphs
        for kind in ("prim::GetAttr", "prim::SetAttr")
        for node in graph.findAllNodes(kind)
    }
    values = {name: cpp_module.getattr(name) for name in names if cpp_module.hasattr(name)}
    kept = (nn.Parameter, torch._C.ScriptModule)
    return {name: value for name, value in values.items() if not isinstance(value, kept)}


def _is_still(now: object, before: object) -> bool:
    if isinstance(before, torch.Tensor):
        return now is before or (
            isinstance(now, torch.Tensor)
            and now.data_ptr() == before.data_ptr()
            and now.shape == before.shape
            and now.dtype == before.dtype
        )
    if isinstance(before, torch.ScriptObject):  # whose class may define no equality
        return isinstance(now, torch.ScriptObject) and hash(now) == hash(before)
    return type(now) is type(before) and bool(now == before)


def _refill(container: _Container, copy: _Container) -> None:
    match container, copy:
        case list(), _:
            container[:] = copy
        case set(), _:
            container.clear()
            container.update(copy)
        case dict(), dict():
            container.clear()
            container.update(copy)


def _changed_keys(before: Mapping[Any, object], now: Mapping[Any, object]) -> list[str]:
    """Keys under which the two do not hold the same object."""
    gone = object()
    return [
        str(key) for key in {**before, **now} if before.get(key, gone) is not now.get(key, gone)
    ]


def _differ(container: _Container, copy: _Container) -> bool:
    """Whether a container no longer holds the same objects."""
    if len(container) != len(copy):
        return True
    if isinstance(container, set):
        return container != copy
    if isinstance(container, dict) and isinstance(copy, dict):
        return any(key not in copy or copy[key] is not value for key, value in container.items())
    return any(a is not b for a, b in zip(container, copy, strict=True))


@contextmanager
def generators_kept(device_type: str) -> Iterator[None]:
    """Leave the random generators as they were.

    Args:
        device_type: whose generators count beside the CPU's.
    """
    if device_type == "cpu":
        before = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(before)
    else:
        count = torch.get_device_module(device_type).device_count()
        with torch.random.fork_rng(range(count), device_type=device_type):
            yield


@contextmanager
def seeded(device_type: str) -> Iterator[None]:
    """Draw the same random numbers in each such block, and leave the generators as they were.

    Args:
        device_type: whose generators count beside the CPU's.
    """
    with generators_kept(device_type):
        torch.default_generator.manual_seed(0)
        if device_type != "cpu":
            torch.get_device_module(device_type).manual_seed_all(0)
        yield
