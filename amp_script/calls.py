"""One call of a model: its arguments bound to names and taken apart to tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from amp_script.errors import TracingError
from amp_script.structure import Structure, flatten, leaves, unflatten

__all__ = ["Call"]


@dataclass(frozen=True)
class Call:
    """Arguments of one call.

    Attributes:
        parameters: structure of each argument by name, positional ones first.
        tensors: all tensors of the arguments, in order.
        positional: how many arguments go by position.
    """

    parameters: Mapping[str, Structure]
    tensors: tuple[torch.Tensor, ...]
    positional: int

    @classmethod
    def bind(
        cls, model: object, inputs: object, kwargs: Mapping[str, object] | None = None
    ) -> Call:
        """Bind inputs to a model's argument names.

        Args:
            model: an ``nn.Module`` or a callable; not run.
            inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
                arguments.
            kwargs: keyword arguments beside positional ones.

        Raises:
            TracingError: the inputs do not fit the model's signature.
            StructureError: an argument is no structure of tensors.
        """
        args: tuple[object, ...] = ()
        keywords = dict(kwargs or {})
        if isinstance(inputs, Mapping):
            keywords = {**inputs, **keywords}
        elif isinstance(inputs, (tuple, list)):
            args = tuple(inputs)
        else:
            args = (inputs,)
        names = _positional_names(model, args, keywords)
        parameters: dict[str, Structure] = {}
        tensors: list[torch.Tensor] = []
        for name, value in [*zip(names, args, strict=True), *keywords.items()]:
            found, parameters[name] = flatten(value, name)
            tensors += found
        return cls(parameters, tuple(tensors), len(args))

    @property
    def paths(self) -> list[str]:
        """Names of the tensors, such as ``"batch['ids']"``."""
        return [leaf.path for part in self.parameters.values() for leaf in leaves(part)]

    def run(self, model: Callable[..., object], tensors: Iterable[torch.Tensor]) -> object:
        """Call a model with these arguments, other tensors in the place of these."""
        remaining = iter(tensors)
        values = [unflatten(part, remaining) for part in self.parameters.values()]
        named = dict(zip(self.parameters, values, strict=True))
        keywords = list(self.parameters)[self.positional :]
        return model(*values[: self.positional], **{name: named[name] for name in keywords})


def _positional_names(
    model: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    function = model.forward if isinstance(model, nn.Module) else model
    assert callable(function)
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TracingError(f"the example inputs do not fit the model: {error}") from None
    except ValueError:  # a built-in function, which has no signature
        return [f"input_{index}" for index in range(len(args))]
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{index}" for index in range(len(args) - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(name)
    return names[: len(args)]
