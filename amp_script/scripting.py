"""``script``: compile with TorchScript, lower the autocast regions, follow the caller's autocast.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ScriptModule`` and its methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .compilation import compile_function, compile_module
from .programs import Program, add_program, programs

__all__ = ["LoweredFunction", "LoweredMethod", "LoweredModule", "script"]


class LoweredMethod:
    """One method of a :class:`LoweredModule`, called in the variant for the caller's autocast.

    Attributes other than those of a call are the compiled method's.
    """

    def __init__(self, method: torch._C.ScriptMethod, program: Program) -> None:
        self._method = method
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        return self._program.call(self._method, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the compiled method has: ``graph``, ``code``, ``schema`` and so on."""
        return getattr(self._method, name)


class LoweredModule(torch.jit.RecursiveScriptModule):
    """A ScriptModule whose autocast regions are explicit casts; made by :func:`script`.

    Called inside ``with autocast(...)`` it does what eager code does there. Saved, called from C++,
    or as a part of a module compiled by plain ``torch.jit.script``, it is the program for no
    ambient autocast.
    """

    _disable_script_meta = True

    def __getattr__(self, name: str) -> Any:
        """An attribute or method of the compiled module."""
        found = super().__getattr__(name)
        if isinstance(found, torch._C.ScriptMethod):
            program = programs.get(f"{self._c._type().qualified_name()}.{name}")
            if program is not None:
                found = self.__dict__[name] = LoweredMethod(found, program)
        return found

    def __copy__(self) -> LoweredModule:
        """A module that shares parameters and buffers with this one."""
        return _adopt(super().__copy__())

    def __deepcopy__(self, memo: Any) -> LoweredModule:
        """A module with copies of the parameters and buffers."""
        return _adopt(super().__deepcopy__(memo))

    def _replicate_for_data_parallel(self) -> LoweredModule:
        return _adopt(super()._replicate_for_data_parallel())


def _adopt(module: torch.jit.RecursiveScriptModule) -> LoweredModule:
    """Make a plain ScriptModule, and all inside it, follow the caller's autocast."""
    for child in module.children():
        if type(child) is torch.jit.RecursiveScriptModule:
            _adopt(child)
    for name, value in list(module.__dict__.items()):
        if isinstance(value, torch._C.ScriptMethod):
            del module.__dict__[name]
    module.__class__ = LoweredModule
    return module


class LoweredFunction(torch.jit.ScriptFunction):
    """A scripted function whose autocast regions are explicit casts; made by :func:`script`.

    It is the compiled function itself, so that other scripted code can call it.
    """

    # Without slots of its own, an instance can take the place of a compiled function.
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function in the variant for the caller's autocast."""
        return programs[self.qualified_name].call(self, args, kwargs)


def script(obj: Any) -> Any:
    """Compile a module or function with TorchScript, autocast regions lowered to explicit casts."""
    if isinstance(obj, torch.nn.Module):
        return _script_module(obj)
    return _script_function(obj)


def _script_module(module: torch.nn.Module) -> LoweredModule:
    compiled = compile_module(module)
    methods = {}
    for each in compiled.modules():
        for name in each._c._method_names():
            method = each._c._get_method(name)
            methods[f"{each._c._type().qualified_name()}.{name}"] = method
    fresh = [add_program(*item) for item in methods.items() if item[0] not in programs]
    for program in fresh:
        program.lower()
    return _adopt(compiled)


def _script_function(function: Callable[..., Any]) -> LoweredFunction:
    compiled = compile_function(function)
    add_program(compiled.qualified_name, compiled).lower()
    compiled.__class__ = LoweredFunction
    return compiled
