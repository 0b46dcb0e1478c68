"""``amp-script stubgen``: a stub file for a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from amp_script.artifact import read_program
from amp_script.cli import output
from amp_script.cli.files import require_free
from amp_script.errors import UsageError
from amp_script.stubgen import generate_stub, is_class_name

_UNTELLING = frozenset({"", "Module", "PlaceholderModule", "ScriptModule"})
"""Names of classes that TorchScript makes itself."""


def command(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="The `.pt` file, from amp-script or anybody else."),
    ],
    file: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file to write: `.pyi` for a stub, or `.py` for a module to import, whose "
            "class `amp_script.load(path, like=...)` takes and compares with the model.",
        ),
    ],
    class_name: Annotated[
        str | None,
        typer.Option(
            "--class", metavar="NAME", help="Name of the class; the model's own if not given."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write a stub for a saved model: methods, attributes and submodules with their types.

    Type checkers accept it in their strictest mode.

    Example: `amp-script stubgen encoder.pt -o encoder.pyi`
    """
    require_free(file, force)
    if file.suffix not in (".py", ".pyi"):
        raise UsageError(f"{file}: expected a name that ends in .pyi or .py after -o")
    if class_name is not None and not is_class_name(class_name):
        raise UsageError(f"--class {class_name!r}: expected a name for a class, such as Encoder")
    with output.step(f"reading {model}"):
        module, metadata = read_program(model)
    text = generate_stub(
        module,
        _class_name(module, model) if class_name is None else class_name,
        metadata=metadata,
        importable=file.suffix == ".py",
    )
    file.write_text(text, encoding="utf-8")
    output.line(str(file))


def _class_name(module: torch.jit.ScriptModule, path: Path) -> str:
    name = module.original_name
    if name not in _UNTELLING and is_class_name(name):
        return name
    words = "".join(char if char.isalnum() else " " for char in path.stem).split()
    camel = "".join(word[:1].upper() + word[1:] for word in words)
    return camel if is_class_name(camel) else f"Model{camel}"
