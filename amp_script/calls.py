"""One call of a model: its arguments bound to names and taken apart to tensors."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import nn

from amp_script.errors import TracingError
from amp_script.structure import (
    Constant,
    Number,
    Structure,
    TensorLeaf,
    flatten,
    leaves,
    unflatten,
)

Inputs: TypeAlias = "torch.Tensor | Sequence[object] | Mapping[str, object]"
"""A tensor, positional arguments, or keyword arguments; each argument may be nested."""

__all__ = ["Call", "Inputs"]


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
        cls, model: object, inputs: Inputs, kwargs: Mapping[str, object] | None = None
    ) -> Call:
        """Bind inputs to a model's argument names.

        Args:
            model: an ``nn.Module`` or a callable; not run.
            inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
                arguments.
            kwargs: keyword arguments beside positional ones.

        Raises:
            TracingError: there are no inputs, or they do not fit the model's signature, or the
                model is a class.
            StructureError: an argument is no structure of tensors.
        """
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise TracingError(
                f"the model is the class {model.__name__}: expected a module; make one of it with "
                f"{model.__name__}(...)"
            )
        args: tuple[object, ...] = ()
        keywords = dict(kwargs or {})
        if isinstance(inputs, Mapping):
            keywords = {**inputs, **keywords}
        elif isinstance(inputs, (tuple, list)):
            args = tuple(inputs)
        else:
            args = (inputs,)
        if not args and not keywords:
            raise TracingError(
                "no tensor among the example inputs, and a trace needs at least one; pass "
                "trace_and_freeze(model, (tensor, ...))"
            )
        names = _positional_names(model, args, keywords)
        parameters: dict[str, Structure] = {}
        tensors: list[torch.Tensor] = []
        for name, value in [*zip(names, args, strict=True), *keywords.items()]:
            found, parameters[name] = flatten(value, name)
            tensors += found
        return cls(parameters, tuple(tensors), len(args))

    @property
    def leaves(self) -> list[TensorLeaf | Number | Constant]:
        """The places of all tensors and constants, in order."""
        return [leaf for part in self.parameters.values() for leaf in leaves(part)]

    @property
    def paths(self) -> list[str]:
        """Names of the tensors, such as ``"batch['ids']"``."""
        return [leaf.path for leaf in self.leaves if isinstance(leaf, TensorLeaf)]

    @property
    def signature(self) -> inspect.Signature:
        """The arguments of this call, each with a name of its own."""
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        return inspect.Signature(
            [
                inspect.Parameter(name, kinds[index >= self.positional])
                for index, name in enumerate(self.parameters)
            ]
        )

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors with their paths."""
        return list(zip(self.paths, self.tensors, strict=True))

    def at_border(self, dtypes: Mapping[str, torch.dtype | None]) -> Call:
        """The same call with tensors in the border's dtypes, given by path."""
        return self._with(t.to(dtypes.get(path) or t.dtype) for path, t in self.named_tensors())

    def rounded_by(self, border: Call) -> Call:
        """What a border leaves of this call's values, in this call's dtypes."""
        pairs = zip(border.tensors, self.tensors, strict=True)
        return self._with(at_border.to(tensor.dtype) for at_border, tensor in pairs)

    def in_float32(self) -> Call:
        """The same call with tensors of lower precision in float32."""
        lower = (torch.bfloat16, torch.float16)
        return self._with(t.float() if t.dtype in lower else t for t in self.tensors)

    def fresh(self) -> list[torch.Tensor]:
        """Copies of the tensors, each with memory of its own, for a run that may change them."""
        return [_copy(t.detach()).requires_grad_(t.requires_grad) for t in self.tensors]

    def _with(self, tensors: Iterable[torch.Tensor]) -> Call:
        return replace(self, tensors=tuple(tensors))

    def run(self, model: Callable[..., object], tensors: Iterable[torch.Tensor]) -> object:
        """Call a model with these arguments, other tensors in the place of these."""
        args, kwargs = self.arguments(tensors)
        return model(*args, **kwargs)

    def arguments(
        self, tensors: Iterable[torch.Tensor] | None = None
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """The positional and the keyword arguments, with other tensors if any are given."""
        remaining = iter(self.tensors if tensors is None else tensors)
        values = [unflatten(part, remaining) for part in self.parameters.values()]
        named = list(zip(self.parameters, values, strict=True))
        return tuple(values[: self.positional]), dict(named[self.positional :])


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # A view is copied with the storage around it, at which as_strided may look.
    return copy.deepcopy(tensor) if tensor.layout is torch.strided else tensor.clone()


def _positional_names(
    model: object, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[str]:
    function = model.forward if isinstance(model, nn.Module) else model
    assert callable(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function, which has no signature
        return [f"input_{index}" for index in range(len(args))]
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        by_position = [f"{len(args)} by position"] if args else []
        given = ", ".join([*by_position, *map(repr, kwargs)])
        raise TracingError(
            f"the inputs do not fit the model: {error}; expected "
            f"({', '.join(signature.parameters)}), given {given}"
        ) from None
    names: list[str] = []
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}_{index}" for index in range(len(args) - len(names))]
        elif parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            names.append(name)
    return names[: len(args)]
