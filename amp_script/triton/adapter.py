"""A ``forward`` around a program that takes and returns tensors one by one.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._freeze_module``, and of
``torch.jit._recursive`` ``create_script_module`` and ``wrap_cpp_module``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.jit import _recursive

from amp_script.errors import ExportError
from amp_script.frozen import FrozenModule
from amp_script.made_inputs import split_path
from amp_script.metadata import InputSpec
from amp_script.structure import Constant, Container, Structure
from amp_script.triton.border import Border, JitType, is_kind

__all__ = ["on_tensors"]

Part = tuple[Sequence["str | int"], str]
"""The keys from a container to a tensor inside, and the argument that holds the tensor."""


def on_tensors(program: FrozenModule, border: Border) -> FrozenModule:
    """Return the program with a tensor for each input, by its name, and a tuple of its outputs.

    Arguments that the program holds fast are no arguments any more.

    Raises:
        ExportError: an argument is of a type that only the program itself can make.
    """
    holder = nn.Module()
    holder.program = program
    jit: Any = _recursive
    module: torch.jit.ScriptModule = jit.create_script_module(
        holder.eval(), lambda _: [], share_types=False
    )
    module.define(_source(border))
    # torch.jit.freeze would also optimise numerics: convolutions take in what is added to them.
    freeze: Any = torch._C._freeze_module
    frozen: torch.jit.ScriptModule = jit.wrap_cpp_module(freeze(module.eval()._c, []))
    specs = [
        InputSpec(port.name, port.dtype, port.sizes, program.metadata.device)
        for port in border.inputs
    ]
    return FrozenModule.wrap(frozen, replace(program.metadata, inputs=tuple(specs)))


def _source(border: Border) -> str:
    names = [port.name for port in border.inputs]
    parts: dict[str, list[Part]] = {}
    for port in border.inputs:
        name, steps = split_path(port.path)
        parts.setdefault(name, []).append((steps, port.name))
    given = [
        f"{name}={_packed(border.arguments[name], part, name)}" for name, part in parts.items()
    ]
    outputs = "".join(f"{text}, " for text in _unpacked(border.structure, border.result, "result_"))
    return (
        f"def forward(self, {', '.join(f'{name}: Tensor' for name in names)}):\n"
        f"    result_ = self.program.forward({', '.join(given)})\n"
        f"    return ({outputs})\n"
    )


def _packed(kind: JitType, parts: Sequence[Part], path: str) -> str:
    """An expression for a container of tensors."""
    if len(parts) == 1 and not parts[0][0]:
        return parts[0][1]
    inside: dict[str | int, list[Part]] = {}
    for steps, name in parts:
        inside.setdefault(steps[0], []).append((steps[1:], name))
    if is_kind(kind, "DictType"):
        inner = kind.getValueType()
        items = (f"{k!r}: {_packed(inner, p, f'{path}[{k!r}]')}" for k, p in inside.items())
        return "{" + ", ".join(items) + "}"
    if is_kind(kind, "ListType"):
        inner = kind.getElementType()
        return "[" + ", ".join(_packed(inner, p, path) for p in inside.values()) + "]"
    if is_kind(kind, "TupleType") and all(isinstance(key, int) for key in inside):
        inners = zip(kind.elements(), inside.values(), strict=True)
        return "(" + "".join(f"{_packed(inner, p, path)}, " for inner, p in inners) + ")"
    raise ExportError(
        f"input {path} is a {kind.annotation_str}, which the server cannot make; freeze a function "
        "that takes its tensors"
    )


def _unpacked(structure: Structure, kind: JitType, expression: str) -> Iterator[str]:
    """An expression for each tensor in the result."""
    if isinstance(structure, Constant):
        return
    if not isinstance(structure, Container):
        yield expression
        return
    for index, (key, part) in enumerate(zip(structure.keys, structure.parts, strict=True)):
        if is_kind(kind, "TupleType"):
            yield from _unpacked(part, kind.elements()[index], f"{expression}[{index}]")
        elif is_kind(kind, "DictType"):
            yield from _unpacked(part, kind.getValueType(), f"{expression}[{key!r}]")
        else:
            yield from _unpacked(part, kind.getElementType(), f"{expression}[{index}]")
