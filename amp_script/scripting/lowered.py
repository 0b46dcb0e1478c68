"""``script`` and ``lower``: TorchScript programs with their autocast regions lowered.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.ScriptModule`` and its methods,
``torch._C.import_ir_module``, ``torch._C.import_ir_module_from_buffer``,
``torch.jit._recursive.wrap_cpp_module``.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import torch
from torch.jit._recursive import wrap_cpp_module
from torch.jit._script import RecursiveScriptModule
from typing_extensions import ParamSpec

from .. import policy
from ..artifact import metadata_if_any
from ..devices import ROWS
from ..disk import to_path
from ..errors import ArgumentError, LoweringError
from ..frozen import FrozenModule
from ..jit_state import DeviceState
from ..lowering.functions import copy_of
from ..lowering.traced import name_convolutions
from ..typing import HasForward, TypedScriptModule
from .compilation import compile_function, compile_module
from .programs import Compiled, Library, Program, originals

P = ParamSpec("P")
R = TypeVar("R")

_C: Any = torch._C
"""For what torch's stubs leave out or describe wrongly."""
_wrap_cpp_module: Any = wrap_cpp_module

__all__ = ["LoweredFunction", "LoweredMethod", "LoweredModule", "lower", "script"]


class LoweredMethod:
    """A method or hook of a :class:`LoweredModule`, run in the variant for the caller's autocast.

    Attributes other than those of a call are the compiled method's.
    """

    def __init__(self, method: Compiled, program: Program) -> None:
        self._method = method
        self._program = program

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method."""
        return self._program.call(self._method, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the compiled method has: ``graph``, ``code``, ``schema`` and so on."""
        return getattr(self._method, name)


class LoweredFunction(torch._C.ScriptFunction):  # type: ignore[type-arg]  # not generic when run
    """A scripted function whose autocast regions are explicit casts; made by :func:`script`.

    It is the compiled function itself, so that other scripted code can call it: compiled by
    :func:`script`, in the state at the call, and compiled by plain ``torch.jit.script``, as outside
    every region.
    """

    # Without slots of its own, an instance can take the place of a compiled function.
    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function in the variant for the caller's autocast."""
        return originals.programs[self.qualified_name].call(self, args, kwargs)


class LoweredModule(RecursiveScriptModule):
    """A ScriptModule whose autocast regions are explicit casts; made by :func:`script`.

    Called inside ``with autocast(...)`` it does what eager code does there. Saved, called from C++,
    or as a part of a module compiled by plain ``torch.jit.script``, it is the program for calls
    outside every region.
    """

    _disable_script_meta = True
    _library: Library

    def __getattr__(self, name: str) -> Any:
        """An attribute or method of the compiled module."""
        found = super().__getattr__(name)
        if isinstance(found, torch._C.ScriptMethod):
            program = self._library.programs.get(f"{_type_name(self)}.{name}")
            if program is not None:
                found = vars(self)[name] = LoweredMethod(found, program)
        return found

    def __setattr__(self, attr: str, value: Any) -> None:
        """Set an attribute of the compiled module.

        Raises:
            LoweringError: it is a submodule, and the value is not one of the same compiled type.
        """
        try:
            super().__setattr__(attr, value)
        except RuntimeError as error:
            if not isinstance(getattr(self, attr, None), torch.nn.Module):
                raise
            raise LoweringError(
                f"another submodule {attr!r}",
                "the program was compiled and lowered with the one that is there",
                advice=f"load its state into that, as in module.{attr}.load_state_dict("
                "replacement.state_dict()), or replace it in the original module before script()",
            ) from error

    def save(self, f: Any, **kwargs: Any) -> None:
        """Write the program for calls outside every region to a file, as a ScriptModule's does.

        Raises:
            LoweringError: the program takes gradients inside a region.
        """
        with _explaining():
            super().save(f, **kwargs)  # type: ignore[no-untyped-call]  # torch's own

    def save_to_buffer(self, *args: Any, **kwargs: Any) -> Any:
        """Return what :meth:`save` writes.

        Raises:
            LoweringError: the program takes gradients inside a region.
        """
        with _explaining():
            return super().save_to_buffer(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

    def __copy__(self) -> LoweredModule:
        """A module that shares parameters and buffers with this one."""
        return _adopt(super().__copy__(), self)

    def __deepcopy__(self, memo: Any) -> LoweredModule:
        """A module with copies of the parameters and buffers, which are leaves as the originals."""
        # Copied while gradients are recorded, they would be results of the originals.
        with torch.no_grad():
            copy = _adopt(super().__deepcopy__(memo), self)
        for copied, original in zip(copy.parameters(), self.parameters(), strict=True):
            copied.requires_grad_(original.requires_grad)
        return copy

    def _replicate_for_data_parallel(self) -> LoweredModule:
        # It has no submodules yet: each is replicated on its own, and put in afterwards.
        replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]  # torch's
        _adopt_one(replica, self._library)
        assert isinstance(replica, LoweredModule)
        return replica


@contextmanager
def _explaining() -> Iterator[None]:
    """Say why a program cannot be saved if it is because of what lowering put into it."""
    try:
        yield
    except RuntimeError as error:
        if "Could not export Python function call '_enter'" not in str(error):
            raise
        raise LoweringError(
            "torch.autograd.grad",
            "what it runs inside an autocast region is cast by eager autocast, which a saved "
            "program does not have",
            advice="take the gradients after the region, or do not save the program",
        ) from error


@overload
def script(obj: HasForward[P, R]) -> TypedScriptModule[P, R]: ...
@overload
def script(obj: Callable[P, R]) -> torch.jit.ScriptFunction[P, R]: ...
def script(obj: Any) -> Any:
    """Compile a module or function with TorchScript, autocast regions lowered to explicit casts.

    The program gives eager autocast's dtypes, bits and gradients. Called inside
    ``with autocast(...)`` it does what the eager code does there; saved, called from C++, or as a
    part of something compiled by plain ``torch.jit.script``, it is the program for calls outside
    every region. It runs node by node, without TorchScript's optimising executor, which would
    change bits.

    What is left of the differences from eager mode: a weight that is written to inside a region
    where no gradients are recorded is cast anew, where eager autocast keeps its first cast; an
    eager part that uses a weight in the same region has a cast of its own, so that the weight's
    gradients add up in another order; a saved program that forks adds them up as plain TorchScript
    does, in no order in particular; casts of an input that is a leaf with gradients and a view at
    once are cached; a submodule cannot be replaced afterwards.

    Args:
        obj: an ``nn.Module`` or a function, which may be decorated with ``autocast(...)``, this
            library's or torch's. Parameters and buffers are shared. A module that is compiled
            already is lowered as :func:`lower` does.

    Raises:
        LoweringError: the program cannot be lowered without differing from eager autocast.
        ArgumentError: ``obj`` is neither a module nor a function.
        RuntimeError: TorchScript cannot compile it.
    """
    if isinstance(obj, (LoweredModule, LoweredFunction)):
        return obj
    if isinstance(obj, torch.jit.ScriptModule):
        return lower(obj)
    if isinstance(obj, torch.nn.Module):
        _refuse_backward_hooks(obj)
        compiled_before = [
            each for each in obj.modules() if isinstance(each, torch.jit.ScriptModule)
        ]
        return _lowered_module(compile_module(obj), originals, compiled_before)
    if inspect.isfunction(obj) or inspect.ismethod(obj):
        return _script_function(obj)
    raise ArgumentError(
        "obj",
        f"{obj!r:.60} of type {type(obj).__name__}",
        "a module or a function",
        "torch.jit.script compiles classes, and regions in them are lowered where they are used",
    )


def _refuse_backward_hooks(module: torch.nn.Module) -> None:
    """Refuse what TorchScript drops without a word, and with it what gradients would be."""
    for name, each in module.named_modules():
        if vars(each).get("_backward_hooks") or vars(each).get("_backward_pre_hooks"):
            raise LoweringError(
                f"module {name!r}" if name else "the module",
                "it has backward hooks, which a compiled module does not run",
                advice="remove them before, or put hooks on parameters or output tensors",
            )


@overload
def lower(
    module_or_path: HasForward[P, R],
    *,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
) -> TypedScriptModule[P, R]: ...
@overload
def lower(
    module_or_path: str | os.PathLike[str],
    *,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
) -> TypedScriptModule[..., Any]: ...
def lower(
    module_or_path: Any, *, device_type: str | None = None, dtype: torch.dtype | None = None
) -> Any:
    """Lower the autocast regions in a program that is compiled already, with or without its source.

    With a device type or a dtype a region is put around each method as a whole, which makes a
    mixed-precision program of a float32 one. No autocast class and no question about autocast's
    state is left, so that the file can be read where these are not known.

    Args:
        module_or_path: a ScriptModule, which stays as it is and shares its parameters and buffers
            with the result; or the name of a ``.pt`` file.
        device_type: device type of the region to put around the program; ``"cpu"`` if a dtype
            alone is given.
        dtype: dtype of that region; the device type's own if it alone is given.

    Raises:
        LoweringError: the program cannot be lowered without differing from eager autocast, or is a
            frozen one.
        ArgumentError: the device type has no autocast, or not in the dtype, or
            ``module_or_path`` is neither a ScriptModule nor a name.
        MissingFileError: there is no file of that name.
        ArtifactError: the file holds no TorchScript program.
    """
    around = _region(device_type, dtype)
    if isinstance(module_or_path, LoweredModule) and around is None:
        return module_or_path
    unit = _C.CompilationUnit()
    if isinstance(module_or_path, FrozenModule):
        raise _frozen(f"the {type(module_or_path).__name__}")
    if isinstance(module_or_path, torch.jit.ScriptModule):
        buffer = module_or_path.save_to_buffer()
        with _naming_broken_exits(module_or_path):
            loaded = _C.import_ir_module_from_buffer(unit, buffer, None, {}, False)
        _share_tensors(module_or_path._c, loaded)
    elif isinstance(module_or_path, (str, os.PathLike)):
        path = to_path(module_or_path)
        about = metadata_if_any(path)
        if about is not None and about.kind == "frozen":
            raise _frozen(str(path))
        loaded = _C.import_ir_module(unit, str(path), None, {}, False)
    else:
        raise ArgumentError(
            "module_or_path",
            f"{module_or_path!r:.60} of type {type(module_or_path).__name__}",
            "a ScriptModule or the name of a file",
            "Compile a module with amp_script.script",
        )
    module = _wrap_cpp_module(loaded)
    for each in module.modules():
        for _, method in _methods(each):
            name_convolutions(method.graph)
    return _lowered_module(module, Library(unit, around))


def _frozen(what: str) -> LoweringError:
    return LoweringError(
        what,
        "it is a frozen program, whose casts are explicit already",
        advice="use it as it is",
    )


@contextmanager
def _naming_broken_exits(module: torch.jit.ScriptModule) -> Iterator[None]:
    """Say why what plain TorchScript compiled cannot be read again, if early exits broke it."""
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"(\w+) is not defined in the (true|false) branch", str(error))
        if found is None:
            raise
        for each in module.modules():
            for name, method in _methods(each):
                copy_of(name, method.graph)  # refuses the one that is broken, with its line
        raise LoweringError(
            f"the module {module.original_name}",
            "plain torch.jit.script compiled an early exit inside a with block so that "
            f"{found[1]} is used outside of the branch that makes it",
            advice="compile the original module with amp_script.script, or put what follows the "
            "exit into an else",
        ) from error


def _region(device_type: str | None, dtype: torch.dtype | None) -> tuple[str, DeviceState] | None:
    """The region to put around a program, if one is asked for."""
    if device_type is None and dtype is None:
        return None
    device_type = device_type or "cpu"
    if device_type not in policy.autocast_device_types():
        raise policy.without_autocast(device_type)
    dtype = dtype or torch.get_autocast_dtype(device_type)
    row = ROWS.get(device_type)
    if row is not None and row.dtypes is not None and dtype not in row.dtypes:
        raise ArgumentError(
            "dtype",
            f"{dtype}, which autocast on {device_type!r} does not support",
            f"one of {', '.join(map(str, row.dtypes))}",
        )
    return device_type, DeviceState(True, dtype)


def _share_tensors(original: torch._C.ScriptModule, copy: torch._C.ScriptModule) -> None:
    """Give a copy the tensors of the module that it was copied from."""
    for tensors in (_C.ParameterDict, _C.BufferDict):
        for name, tensor in tensors(original).items():
            copy.setattr(name, tensor)
    children = dict(_C.ModuleDict(copy).items())
    for name, child in _C.ModuleDict(original).items():
        _share_tensors(child, children[name])


def _lowered_module(
    compiled: RecursiveScriptModule,
    library: Library,
    others: Sequence[torch.jit.ScriptModule] = (),
) -> LoweredModule:
    """Lower all methods and hooks in a module.

    Args:
        compiled: the module.
        library: what its methods become programs of.
        others: modules in it that others use, too, which stay as they are.
    """
    for other in others:
        library.learn(other._c, other._library if isinstance(other, LoweredModule) else None)
    own = [each for each in compiled.modules() if not any(each is other for other in others)]
    added = [
        library.add(name, method)
        for each in own
        for name, method in _methods(each)
        if name not in library.programs
    ]
    for program in added:
        program.lower()
    for each in own:
        _adopt_one(each, library)
    assert isinstance(compiled, LoweredModule)
    return compiled


def _methods(module: Any) -> Iterator[tuple[str, Any]]:
    """The methods and hooks of a module by qualified name."""
    for name in module._c._method_names():
        yield f"{_type_name(module)}.{name}", module._c._get_method(name)
    for hook in (*module._c._get_forward_hooks(), *module._c._get_forward_pre_hooks()):
        yield hook.qualified_name, hook


def _type_name(module: Any) -> str:
    return str(module._c._type().qualified_name())


def _adopt(copy: Any, original: LoweredModule) -> LoweredModule:
    """Make a copy of a lowered module, and all inside it, what the original is."""
    inside = dict(copy.named_modules())
    for name, module in original.named_modules():
        if isinstance(module, LoweredModule):
            _adopt_one(inside[name], module._library)
    assert isinstance(copy, LoweredModule)
    return copy


def _adopt_one(module: Any, library: Library) -> None:
    for name, value in list(module.__dict__.items()):
        if isinstance(value, torch._C.ScriptMethod):
            del module.__dict__[name]
    # Hooks of the module that is called are run from Python; those of modules in it, by its graph.
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            if isinstance(hook, torch._C.ScriptFunction):
                hooks[key] = LoweredMethod(hook, library.programs[hook.qualified_name])
    module.__class__ = LoweredModule
    module.__dict__["_library"] = library


def _script_function(function: Callable[..., Any]) -> LoweredFunction:
    compiled = compile_function(function)
    originals.add(compiled.qualified_name, compiled).lower()
    compiled.__class__ = LoweredFunction
    assert isinstance(compiled, LoweredFunction)
    return compiled
