"""The submodules of a model by name, and standing in for their ``forward`` in one thread.

Names are the model's own, dotted, as in ``model.named_modules()``; the model itself is ``""``. What
lies inside a ScriptModule is compiled into it, and no call of it passes through Python.
"""

from __future__ import annotations

import difflib
import fnmatch
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from amp_script.errors import SubmoduleError
from amp_script.interception import replaced
from amp_script.untouched import modules_of

__all__ = [
    "Forward",
    "Names",
    "StandIn",
    "called_from_python",
    "forward_replaced",
    "matching",
    "names_of",
]

Names: TypeAlias = "Mapping[nn.Module, Sequence[str]]"
"""Modules in the order of ``named_modules``, each with every name that it has."""

Forward: TypeAlias = Callable[..., object]
StandIn: TypeAlias = Callable[[nn.Module, Forward, tuple[object, ...], dict[str, object]], object]
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

    Of several such blocks around a call each has its turn, the innermost first. Neither the modules
    nor the calls of other threads change, and copies that are made meanwhile are copies of the
    modules as they are.

    Args:
        modules: none inside a ScriptModule.
        stand_in: what is called.
    """
    layers: list[_Layer] = _in_thread.__dict__.setdefault("layers", [])
    places = [_Place(module, _owner(module)) for module in modules]
    layer = _Layer({id(vars(place.module)): place for place in places}, stand_in)
    with ExitStack() as stack:
        for owner in dict.fromkeys(place.owner for place in places):
            replacement = (
                partial(_of_class, owner) if isinstance(owner, type) else partial(_of_module, owner)
            )
            stack.enter_context(replaced(owner, "forward", replacement))
        layers.append(layer)
        stack.callback(layers.remove, layer)
        yield


class _Place(NamedTuple):
    """A module, and where its ``forward`` is looked up: its class, or itself."""

    module: nn.Module
    owner: nn.Module | type[nn.Module]


@dataclass(frozen=True, eq=False)
class _Layer:
    """One block: the modules that it is about, and what it puts in their place.

    The modules are known by the identity of their attributes: while torch.export runs a model with
    a module that has two names, another object with the same attributes takes each one's place.
    """

    places: Mapping[int, _Place]
    stand_in: StandIn


_in_thread = threading.local()
"""``layers``: those that the thread is in, the innermost last."""


def _owner(module: nn.Module) -> nn.Module | type[nn.Module]:
    on_itself = "forward" in vars(module) or isinstance(module, torch.jit.ScriptModule)
    return module if on_itself else type(module)


def _of_class(
    owner: type[nn.Module], original: Forward, module: nn.Module, *args: object, **kwargs: object
) -> object:
    """Stand for ``owner.forward``."""
    return _call(_Place(module, owner), partial(original, module), *args, **kwargs)


def _of_module(module: nn.Module, original: Forward, *args: object, **kwargs: object) -> object:
    """Stand for ``module.forward``."""
    return _call(_Place(module, module), original, *args, **kwargs)


def _call(called: _Place, original: Forward, *args: object, **kwargs: object) -> object:
    forward = original
    for layer in _in_thread.layers:
        place = layer.places.get(id(vars(called.module)))
        # A subclass that calls its parent's forward has had its turn.
        if place is not None and place.owner is called.owner:
            forward = partial(_turn, layer.stand_in, place.module, forward)
    return forward(*args, **kwargs)


def _turn(
    stand_in: StandIn, module: nn.Module, forward: Forward, *args: object, **kwargs: object
) -> object:
    return stand_in(module, forward, args, kwargs)
