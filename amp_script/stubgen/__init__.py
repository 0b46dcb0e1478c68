"""Stubs for compiled models: the ``.pyi`` that a ScriptModule has no other way to come by."""

from __future__ import annotations

import keyword

import torch

from amp_script.dtypes import dtype_name
from amp_script.errors import StubsError
from amp_script.frozen import FrozenModule
from amp_script.metadata import InputSpec, Metadata
from amp_script.stubgen.program import describe
from amp_script.stubgen.rendering import render

__all__ = ["generate_stub", "is_class_name"]


def generate_stub(
    module: torch.jit.ScriptModule,
    class_name: str,
    *,
    metadata: Metadata | None = None,
    importable: bool = False,
) -> str:
    """Write a stub for a compiled model.

    The stub has a class for the module with ``forward`` and every other method, attributes,
    parameters, buffers, constants, and a nested class for each submodule; and the classes, enums,
    named tuples and interfaces that these mention. Names that Python cannot hold are mapped: a
    parameter becomes positional, a submodule is noted.

    Args:
        module: a live or loaded ScriptModule.
        class_name: name of the class in the stub.
        metadata: what is known about the module's inputs; a frozen module brings its own.
        importable: write the text of a ``.py`` file instead of a ``.pyi``; its class can be given
            to ``amp_script.load(path, like=...)``.

    Returns:
        The text, accepted by ``mypy --strict`` and by pyright.

    Raises:
        StubsError: ``class_name`` is no name, or ``module`` is no ScriptModule.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        raise StubsError(
            f"a stub needs a torch.jit.ScriptModule, and this is a {type(module).__name__}: "
            "compile it with amp_script.script or trace_and_freeze"
        )
    if not is_class_name(class_name):
        raise StubsError(f"{class_name!r} is no name for a class: expected one such as 'Encoder'")
    if metadata is None and isinstance(module, FrozenModule):
        metadata = module.metadata
    described, definitions = describe(module)
    return render(
        described,
        definitions,
        class_name,
        summary="" if metadata is None else _summary(metadata),
        inputs=() if metadata is None else [_line(spec) for spec in metadata.inputs],
        importable=importable,
    )


def is_class_name(name: str) -> bool:
    """Whether a class in Python may have the name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def _summary(metadata: Metadata) -> str:
    dtype = "" if metadata.dtype is None else f" in {dtype_name(metadata.dtype)}"
    return f"{metadata.kind}{dtype} for {metadata.device}"


def _line(spec: InputSpec) -> str:
    if spec.dtype is None:
        return f"{spec.name}: no tensor."
    shape = "" if spec.shape is None else f" of shape {_shape(spec.shape)}"
    device = "" if spec.device is None else f", on {spec.device}"
    return f"{spec.name}: {dtype_name(spec.dtype)}{shape}{device}."


def _shape(sizes: tuple[int | None, ...]) -> str:
    shown = ["any" if size is None else str(size) for size in sizes]
    return f"({', '.join(shown)}{',' * (len(shown) == 1)})"
