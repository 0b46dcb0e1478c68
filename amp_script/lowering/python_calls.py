"""Calls of what eager autocast itself must cast: Python, and the autograd engine.

A lowered program runs shielded from autocast. Ignored functions and autograd functions run Python,
and ``torch.autograd.grad`` inside a region runs derivatives, which autocast casts like everything
else. So each is put between two calls of ours that enter the state of the place in the calling
thread, and leave it. These two are Python. A program that calls Python cannot be saved anyway; one
that takes gradients inside a region cannot either, and can if it takes them after the region.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..jit_state import AmbientState
from ._graph import Editor, Graph, Value, compiled_graph, dtypes_by_code
from .regions import Site
from .state import OFF


@dataclass(frozen=True)
class _Before:
    """What entering a state has to put back."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]
    cache_enabled: bool


class _Entered(threading.local):
    """The states that the thread's programs have entered and not left, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Before] = []


_entered = _Entered()


@contextmanager
def leaving_what_is_entered() -> Iterator[None]:
    """Leave states that an exception keeps the programs run inside from leaving.

    What is put back is what they were entered in, so this goes inside of what changes it.
    """
    depth = len(_entered.stack)
    try:
        yield
    finally:
        while len(_entered.stack) > depth:
            _leave()


@torch.jit.ignore  # type: ignore[untyped-decorator]  # torch's own
def _enter(names: list[str], targets: list[int], dtypes: list[int], cache_enabled: bool) -> None:
    now = AmbientState.current()
    devices = tuple((name, state.enabled, state.dtype) for name, state in now.devices)
    _entered.stack.append(_Before(devices, now.cache_enabled))
    for name, target, dtype in zip(names, targets, dtypes, strict=True):
        torch.set_autocast_enabled(name, target != OFF)
        torch.set_autocast_dtype(name, dtypes_by_code()[dtype])
    torch.set_autocast_cache_enabled(cache_enabled)
    torch.autocast_increment_nesting()


@torch.jit.ignore  # type: ignore[untyped-decorator]  # torch's own
def _leave() -> None:
    before = _entered.stack.pop()
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    for name, enabled, dtype in before.devices:
        torch.set_autocast_enabled(name, enabled)
        torch.set_autocast_dtype(name, dtype)
    torch.set_autocast_cache_enabled(before.cache_enabled)


# TorchScript reads annotations as they are, and those above are text.
_enter.__annotations__ = {
    "names": list[str],
    "targets": list[int],
    "dtypes": list[int],
    "cache_enabled": bool,
    "return": None,
}
_leave.__annotations__ = {"return": None}


def _call_enter() -> Graph:
    return compiled_graph(
        """
def enter(names: List[str], targets: List[int], dtypes: List[int], cache_enabled: bool) -> None:
    return _enter(names, targets, dtypes, cache_enabled)
""",
        {"_enter": _enter},
    )


def _call_leave() -> Graph:
    return compiled_graph("def leave() -> None:\n    return _leave()\n", {"_leave": _leave})


def enter_state_around(editor: Editor, site: Site) -> None:
    """Put a node between two calls that enter and leave the state it is in, if autocast is on.

    Args:
        editor: of the graph.
        site: the node and its state.
    """
    node, state = site.node, site.state
    if not state.active():
        return
    integer = torch._C.IntType.get()

    def integers(items: list[int | Value]) -> Value:
        values = [editor.value_before(node, item) for item in items]
        return editor.list_before(node, integer, values)

    regions = state.devices.values()
    editor.graph_before(
        node,
        _call_enter(),
        [
            editor.constant_before(node, list(state.devices)),
            integers([region.target for region in regions]),
            integers([region.dtype for region in regions]),
            editor.value_before(node, state.cache_enabled),
        ],
    )
    editor.graph_after(node, _call_leave())
