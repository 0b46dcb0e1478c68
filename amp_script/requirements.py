"""What a model and its inputs have to be, asked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch
from torch.nn.parameter import is_lazy

from amp_script.calls import Call
from amp_script.errors import TracingError
from amp_script.regions import Region
from amp_script.untouched import modules_of

__all__ = ["require_runnable", "require_traceable"]


def require_runnable(model: object, call: Call, region: Region) -> None:
    """Refuse a model in training mode or without the shapes of its weights, weights and inputs on
    another device than the region's, and inputs of a kind that no program takes.

    Raises:
        TracingError: says what it is, and what to do.
    """
    for module in modules_of(model):
        training = [
            # A frozen part has no mode.
            name
            for name, part in module.named_modules()
            if getattr(part, "training", False)
        ]
        if training:
            shown = ", ".join(name or type(module).__name__ for name in training[:3])
            more = ", ..." if len(training) > 3 else ""
            raise TracingError(f"the model is in training mode ({shown}{more}); call eval() first")
        state = [*module.named_parameters(), *module.named_buffers()]
        _require_shapes(state)
        _require_device(state, region, "move the model")
    _require_device(call.named_tensors(), region, "move it")
    require_traceable(call)


def _require_shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        if is_lazy(tensor):
            raise TracingError(
                f"{name} has no shape yet, since its module is lazy; run the model once on inputs "
                "like these first"
            )


def _require_device(tensors: Iterable[tuple[str, torch.Tensor]], region: Region, how: str) -> None:
    for name, tensor in tensors:
        if tensor.device.type != region.device_type:
            raise TracingError(
                f"{name} is on {str(tensor.device)!r} and the region on {region.device_type!r}; "
                f"{how} with .to({region.device_type!r}), or pass "
                f"device_type={tensor.device.type!r}"
            )


_UNTRACEABLE: Final[Mapping[str, Callable[[torch.Tensor], bool]]] = {
    "nested": lambda tensor: tensor.is_nested,
    "quantized": lambda tensor: tensor.is_quantized,
    "oneDNN": lambda tensor: tensor.is_mkldnn,
}


def require_traceable(call: Call) -> None:
    """Refuse inputs of a kind that no program takes.

    Raises:
        TracingError: names it.
    """
    for name, tensor in call.named_tensors():
        if type(tensor.detach()) is not torch.Tensor:  # that of a Parameter is
            raise TracingError(
                f"{name} is of the class {type(tensor).__name__}, a subclass of torch.Tensor: "
                "expected a plain tensor. Give it as .as_subclass(torch.Tensor); the program takes "
                "tensors of subclasses still"
            )
        for kind, is_of_kind in _UNTRACEABLE.items():
            if is_of_kind(tensor):
                raise TracingError(
                    f"{name} is a {kind} tensor: expected a strided or a sparse one. Make it in "
                    "the model from tensors that say the same, such as a padded one and its lengths"
                )
