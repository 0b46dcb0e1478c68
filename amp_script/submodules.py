"""The submodules of a model by name, and standing in for their ``forward`` in one thread.

Names are the model's own, dotted, as in ``model.named_modules()``; the model itself is ``""``. What
lies inside a ScriptModule is compiled into it, and no call of it passes through Python.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from amp_script.errors import SubmoduleError
from amp_script.interception import replaced
from amp_script.untouched import modules_of

__all__ = ["Names", "StandIn", "called_from_python", "forward_replaced", "matching", "names_of"]

Names: TypeAlias = "Mapping[nn.Module, Sequence[str]]"
"""Modules in the order of ``named_modules``, each with every name that it has."""

StandIn: TypeAlias = (
    "Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]"
)
"""Takes a module, its own ``forward``, and the arguments of a call; returns what the call does."""


def names_of(model: object) -> Names:
    """All modules of a model, or of those that a function runs, with their names."""
    names: dict[nn.Module, list[str]] = {}
    for root in modules_of(model):
        for name, module in root.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
    return names


def called_from_python(model: object) -> set[nn.Module]:
    """The modules of a model but those inside ScriptModules."""
    found: set[nn.Module] = set()
    pending = list(modules_of(model))
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            if not isinstance(module, torch.jit.ScriptModule):
                pending += module.children()
    return found


def matching(pattern: str, names: Names) -> list[nn.Module]:
    """The modules that have a name which is the pattern, or which it matches as file names.

    ``*`` stands for any characters, dots among them, ``?`` for one, ``[...]`` for one of several.

    Raises:
        SubmoduleError: there are none; lists near names.
    """
    found = [
        module
        for module, own in names.items()
        if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for name in own)
    ]
    if not found:
        raise SubmoduleError(pattern, f"it matches no submodule{_near(pattern, names)}")
    return found


def _near(pattern: str, names: Names) -> str:
    known = [name for own in names.values() for name in own if name]
    if not known:
        return ", and the model has none; '' is the model itself"
    near = difflib.get_close_matches(pattern, known, n=5, cutoff=0.5) or known[:5]
    return f"; there are {', '.join(map(repr, near))}" + (", ..." if len(near) < len(known) else "")


@contextmanager
def forward_replaced(modules: Collection[nn.Module], stand_in: StandIn) -> Iterator[None]:
    """Have the calling thread's calls of the modules' ``forward`` go to another function.

    Neither the modules nor the calls of other threads change, and copies that are made meanwhile
    are copies of the modules as they are.

    Args:
        modules: none inside a ScriptModule.
        stand_in: what is called.
    """
    with ExitStack() as stack:
        for owner, own in _owners(modules).items():
            replacement = (
                partial(_of_class, owner, own, stand_in)
                if isinstance(owner, type)
                else partial(_of_instance, owner, stand_in)
            )
            stack.enter_context(replaced(owner, "forward", replacement))
        yield


def _owners(modules: Collection[nn.Module]) -> dict[Any, set[int]]:
    """Where each module's ``forward`` is looked up: its class, or itself."""
    owners: dict[Any, set[int]] = {}
    for module in modules:
        on_itself = "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)
        owners.setdefault(module if on_itself else type(module), set()).add(id(module))
    return owners


def _of_class(
    owner: type,
    own: Collection[int],
    stand_in: StandIn,
    original: Callable[..., Any],
    module: nn.Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # A subclass that calls its parent's forward has had its turn.
    if type(module) is not owner or id(module) not in own:
        return original(module, *args, **kwargs)
    return stand_in(module, partial(original, module), args, kwargs)


def _of_instance(
    module: nn.Module, stand_in: StandIn, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return stand_in(module, original, args, kwargs)
