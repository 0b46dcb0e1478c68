"""Which submodule each recorded operator came from, kept where it outlives freezing and saving.

The tracer notes the Python stack at every operator, and that text goes through every pass and into
the file, where TorchScript's own scopes and call stacks end. So each call of a submodule's
``forward`` gets a frame of its own in that stack, whose function is named after the submodule.

Private names used here, present in torch 2.6 to 2.15: ``nn.Module._slow_forward``, through which
modules run while they are traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Final
from urllib.parse import quote, unquote

from torch import nn

from amp_script.interception import replaced
from amp_script.lowering._graph import Node
from amp_script.untouched import modules_of

__all__ = ["named_frames", "submodule_of"]


@contextmanager
def named_frames(model: object) -> Iterator[None]:
    """Name the frames of the model's submodules in what the calling thread records.

    Names are those of ``model.named_modules()``, a shared submodule's the first; of a function,
    those of the module that it runs. Where it runs several, no name says which, and none is kept.
    """
    roots = modules_of(model)
    frames: dict[int, Callable[..., object]] = {}
    if len(roots) == 1:
        frames = {id(module): _frame(name) for name, module in roots[0].named_modules()}

    def run(
        original: Callable[..., object], module: nn.Module, *args: object, **kwargs: object
    ) -> object:
        frame: Callable[..., object] = frames.get(id(module), _forward)
        return frame(original, module, args, kwargs)

    with replaced(nn.Module, "_slow_forward", run):
        yield


def _forward(
    original: Callable[..., object],
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    return original(module, *args, **kwargs)


def _frame(name: str) -> Callable[..., object]:
    """:func:`_forward` under the name of a submodule.

    The file stays this one, by which source lines and warnings know that it is not the user's.
    """
    code = _forward.__code__.replace(co_name=f"submodule {_ROOT}{quote(name)}")
    return FunctionType(code, {})


_ROOT: Final = "/"
"""Before each name, so that the model itself, whose name is empty, has one too."""

_FRAME: Final = re.compile(rf"\(\d+\): submodule {_ROOT}(?P<name>\S*)$", re.MULTILINE)
"""A line of a stack as the tracer writes it, the innermost first; no Python name has a space."""


def submodule_of(node: Node) -> str | None:
    """The dotted name of the submodule that an operator came from, ``""`` for the model itself.

    Returns:
        None where the stack names none: the operator was not recorded by this library, or not in
        a call of the model's.
    """
    found = _FRAME.search(str(node.sourceRange()))
    return None if found is None else unquote(found["name"])
