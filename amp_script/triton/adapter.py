"""A ``forward`` around a program that takes and returns tensors one by one.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._freeze_module``, and of
``torch.jit._recursive`` ``create_script_module`` and ``wrap_cpp_module``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.jit import _recursive

from amp_script.calls import Call
from amp_script.errors import ExportError
from amp_script.frozen import FrozenModule
from amp_script.metadata import InputSpec
from amp_script.structure import Constant, Container, Structure
from amp_script.stubgen.annotations import is_defined_by_program
from amp_script.stubgen.program import literal
from amp_script.triton.border import Border, JitType, is_kind, place_of

__all__ = ["on_tensors"]


def on_tensors(program: FrozenModule, border: Border, call: Call) -> FrozenModule:
    """Return the program with a tensor for each input, by its name, and a tuple of its outputs.

    What else the call gives, the program holds fast, and it is no argument any more.

    Raises:
        ExportError: an argument is of a type that only the program itself can make.
    """
    holder = nn.Module()
    holder.program = program
    jit: Any = _recursive
    module: torch.jit.ScriptModule = jit.create_script_module(
        holder.eval(), lambda _: [], share_types=False
    )
    module.define(_source(border, call))
    # torch.jit.freeze would also optimise numerics: convolutions take in what is added to them.
    freeze: Any = torch._C._freeze_module
    frozen: torch.jit.ScriptModule = jit.wrap_cpp_module(freeze(module.eval()._c, []))
    specs = [
        InputSpec(port.name, port.dtype, port.sizes, program.metadata.device)
        for port in border.inputs
    ]
    return FrozenModule.wrap(frozen, replace(program.metadata, inputs=tuple(specs)))


def _source(border: Border, call: Call) -> str:
    names = {place_of(port.path): port.name for port in border.inputs}
    given = [
        f"{name}={_packed(structure, border.arguments[name], names)}"
        for name, structure in call.parameters.items()
    ]
    outputs = "".join(f"{text}, " for text in _unpacked(border.structure, border.result, "result_"))
    return (
        f"def forward(self, {', '.join(f'{name}: Tensor' for name in names.values())}):\n"
        f"    result_ = self.program.forward({', '.join(given)})\n"
        f"    return ({outputs})\n"
    )


def _packed(structure: Structure, kind: JitType, names: Mapping[tuple[str | int, ...], str]) -> str:
    """An expression for an argument or a part of one: its tensors by name, the rest as it was."""
    if isinstance(structure, Constant):
        value = structure.value
        if is_kind(kind, "FloatType") and isinstance(value, int):
            value = float(value)
        return literal(value)
    if not isinstance(structure, Container):
        return names[place_of(structure.path)]
    # What is empty has no type but the one that it is given.
    form = f"torch.jit.annotate({kind.annotation_str}, {{}})"
    if is_kind(kind, "DictType"):
        inner = kind.getValueType()
        items = zip(structure.keys, structure.parts, strict=True)
        inside = (f"{key!r}: {_packed(part, inner, names)}" for key, part in items)
        return form.format("{" + ", ".join(inside) + "}")
    if is_kind(kind, "ListType"):
        inner = kind.getElementType()
        inside = (_packed(part, inner, names) for part in structure.parts)
        return form.format("[" + ", ".join(inside) + "]")
    if is_kind(kind, "TupleType") and not is_defined_by_program(kind.annotation_str):
        inners = zip(structure.parts, kind.elements(), strict=True)
        return "(" + "".join(f"{_packed(part, inner, names)}, " for part, inner in inners) + ")"
    raise ExportError(
        f"input {structure.path} is a {kind.annotation_str}, which the server cannot make; freeze "
        "a function that takes its tensors"
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
