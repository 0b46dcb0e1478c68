"""The types that a compiled model keeps: what its call takes and gives, seen by a type checker.

``torch.jit.script(net)`` is ``Any`` to a type checker. What this library compiles is a
:class:`TypedScriptModule`: a ``torch.jit.ScriptModule`` whose call has the parameters and the result
of ``net.forward``. For a file there is no ``net``: a subclass of :class:`TypedScriptModule`, written
by hand or by ``amp-script stubgen``, then describes the module in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

import torch
from typing_extensions import ParamSpec

__all__ = ["HasForward", "TypedScriptModule"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class HasForward(Protocol[P, R_co]):
    """Whatever has a ``forward``: an ``nn.Module``, to a checker that is after its signature."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Take and give what the model does."""
        ...


class _Description(type(torch.jit.ScriptModule)):  # type: ignore[misc]  # torch's metaclass is untyped
    """Makes every script module an instance of the plain description, and makes none itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls is TypedScriptModule and isinstance(instance, torch.jit.ScriptModule)

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError(
            f"{cls.__qualname__} describes a script module and is not one: make one with "
            "amp_script.script, trace_and_freeze, or load(path, like=...)"
        )


class TypedScriptModule(torch.jit.ScriptModule, Generic[P, R_co], metaclass=_Description):
    """A ``torch.jit.ScriptModule`` whose call takes ``P`` and returns ``R_co``.

    ``TypedScriptModule[[Tensor, int], Tensor]`` in an annotation is a model of a tensor and an
    integer. There are no such objects apart from script modules: ``isinstance`` holds for each of
    them, and a subclass is a description of one, which ``amp_script.load(path, like=...)`` compares
    with the file.
    """

    if TYPE_CHECKING:

        def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
