"""Saving and loading: TorchScript files that say what they are.

A saved file is an ordinary TorchScript archive, which ``torch.jit.load`` and libtorch read; the
metadata ride along as an extra file. A file is written under a temporary name in the same folder,
flushed to the disk and renamed, so that a crash leaves either the old file or the new one.

Private names used here, present in torch 2.6 to 2.15: ``torch._C.CompilationUnit``,
``torch._C.import_ir_module`` (``torch.jit.load`` is the same behind a deprecation warning).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch.jit._recursive import wrap_cpp_module

from amp_script.compute import Compute
from amp_script.errors import ArtifactError
from amp_script.frozen import FrozenModule
from amp_script.metadata import EXTRA_FILE, Metadata

__all__ = ["load", "save"]


def save(
    module: torch.jit.ScriptModule,
    path: str | os.PathLike[str],
    *,
    compute: Literal["native", "upcast"] | None = None,
) -> None:
    """Write a module to a file that plain ``torch.jit.load`` and libtorch read.

    Args:
        module: what ``trace_and_freeze``, ``load`` or ``script`` returned.
        path: the file; replaced if it exists, and left as it is if writing fails.
        compute: plan that the file holds for readers that choose none, such as C++. ``None`` keeps
            the weights in the reduced dtype; :func:`load` runs them with whichever plan suits the
            machine. ``"upcast"`` runs in float32 kernels wherever it is loaded, with the weights
            rounded and stored in float32, so that no call has to convert them.

    Raises:
        ArtifactError: the file cannot be written.
        ValueError: the module cannot be stored with that plan.
    """
    path = Path(path)
    extra_files = {}
    if isinstance(module, FrozenModule):
        module = module if compute is None else module.baked(compute)
    elif compute is None:
        extra_files[EXTRA_FILE] = Metadata("scripted", dtype=None, device="cpu").to_json()
    else:
        raise ValueError(f"compute={compute!r} is for frozen modules, not {type(module).__name__}")
    with _replacing(path) as temporary:
        module.save(str(temporary), _extra_files=extra_files)


def load(
    path: str | os.PathLike[str],
    *,
    compute: Compute = "auto",
    map_location: str | torch.device | None = None,
) -> torch.jit.ScriptModule:
    """Load a file that :func:`save` wrote.

    Args:
        path: the file.
        compute: plan to run it with; ``"auto"`` takes the one that suits this machine. A file with
            a plan baked in has no other.
        map_location: device to put the constants on.

    Returns:
        A :class:`FrozenModule` for a frozen program, else a plain ScriptModule.

    Raises:
        ArtifactError: the file is missing, damaged, or none of ours; the message names it.
        ValueError: there is no such plan for the program.
    """
    path = Path(path)
    metadata = read_metadata(path)
    device = torch.device(map_location) if map_location is not None else None
    unit = torch._C.CompilationUnit()
    try:
        # The last argument is missing from torch's stub: whether to restore traced shapes.
        cpp_module = torch._C.import_ir_module(unit, str(path), device, {}, False)  # type: ignore[call-arg]
    except RuntimeError as error:
        raise ArtifactError(str(path), f"damaged: {_first_line(error)}") from error
    module: torch.jit.ScriptModule = wrap_cpp_module(cpp_module)  # type: ignore[no-untyped-call]
    return (
        FrozenModule.wrap(module, metadata, compute=compute)
        if metadata.kind == "frozen"
        else module
    )


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Read a file's metadata without loading its program.

    Raises:
        ArtifactError: the file is missing, damaged, or none of ours; the message names it.
    """
    path = Path(path)
    if not path.is_file():
        raise ArtifactError(str(path), "a folder, not a file" if path.is_dir() else "no such file")
    try:
        reader = torch._C.PyTorchFileReader(str(path))
    except RuntimeError as error:
        raise ArtifactError(str(path), f"no TorchScript archive: {_first_line(error)}") from error
    if f"extra/{EXTRA_FILE}" not in reader.get_all_records():
        raise ArtifactError(
            str(path),
            "not written by amp-script: it has no metadata",
            "Load it with torch.jit.load, or make it a mixed-precision one with amp_script.lower",
        )
    try:
        return Metadata.from_json(reader.get_record(f"extra/{EXTRA_FILE}").decode())
    except ValueError as error:
        raise ArtifactError(str(path), f"unreadable metadata: {error}") from error


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a name in a new folder beside ``path`` that takes its place if the block succeeds.

    The name is the file's own, because TorchScript writes it into the archive. What a link points
    to is replaced, and not the link.
    """
    target = Path(os.path.realpath(path))
    try:
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            temporary = Path(folder) / target.name
            yield temporary
            _flush(temporary)
            temporary.replace(target)
        _flush(target.parent)
    except OSError as error:
        raise ArtifactError(str(path), f"cannot write there: {error.strerror}") from error


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file, or which files a folder has."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
