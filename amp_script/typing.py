"""The types that a compiled model keeps: what its call takes and gives, seen by a type checker.

``torch.jit.script(net)`` is ``Any`` to a type checker. What this library compiles is a
:class:`TypedScriptModule`: a ``torch.jit.ScriptModule`` whose call has the parameters and the
result of ``net.forward``. For a file there is no ``net``: a subclass of
:class:`TypedScriptModule`, written by hand or by ``amp-script stubgen``, then describes the module
in it.

Private name used here, present in torch 2.6 to 2.15: ``torch.jit._script.ScriptMeta``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NoReturn, Protocol, TypeVar

import torch
from torch.jit._script import ScriptMeta
from typing_extensions import ParamSpec

__all__ = ["HasForward", "TypedScriptModule"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class HasForward(Protocol[P, R_co]):
    """Whatever has a ``forward``: an ``nn.Module``, to a checker that is after its signature."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Take and give what the model does."""
        ...


class _Description(ScriptMeta):
    """Makes every script module an instance of the plain description, and makes none itself."""

    def __instancecheck__(cls, instance: object) -> bool:  # noqa: N805  # a metaclass
        if cls is TypedScriptModule:
            return isinstance(instance, torch.jit.ScriptModule)
        return type.__instancecheck__(cls, instance)

    if not TYPE_CHECKING:  # A checker takes what this returns for the type of every instance.

        def __call__(cls, *args: object, **kwargs: object) -> NoReturn:  # noqa: N805
            raise TypeError(
                f"{cls.__qualname__} describes a script module and makes none: make one with "
                "amp_script.script, trace_and_freeze, or load(path, like=...)"
            )


class TypedScriptModule(torch.jit.ScriptModule, Generic[P, R_co], metaclass=_Description):
    """A ``torch.jit.ScriptModule`` whose call takes ``P`` and returns ``R_co``.

    ``TypedScriptModule[[Tensor, int], Tensor]`` in an annotation is a model of a tensor and an
    integer. ``isinstance`` holds for every script module, since none is told apart by its
    signature. A subclass describes a module, and ``amp_script.load(path, like=...)`` compares it
    with the file.
    """

    # For torch's metaclass: no class to compile.
    _disable_script_meta = True

    if TYPE_CHECKING:

        def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
            """Run the model."""
            ...

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
            """Run the model."""
            ...
