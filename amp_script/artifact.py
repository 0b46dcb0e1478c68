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
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, overload

import torch
from torch.jit._recursive import wrap_cpp_module

from amp_script.compatibility import oldest_libtorch, runs_in_lite_interpreter
from amp_script.compute import Compute, CppModule
from amp_script.disk import require_room, stored_bytes, to_path
from amp_script.errors import ArgumentError, ArtifactError, MissingFileError
from amp_script.frozen import FrozenModule
from amp_script.gist import first_line
from amp_script.lowering._graph import constant, nodes_of
from amp_script.metadata import EXTRA_FILE, Metadata
from amp_script.stubgen.conformance import check
from amp_script.typing import TypedScriptModule

__all__ = ["load", "metadata_if_any", "read_metadata", "read_program", "save"]

M = TypeVar("M", bound=torch.jit.ScriptModule)


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
        ArgumentError: the module is none that can be saved, or the path is none.
        ValueError: the module cannot be stored with that plan.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            "module",
            f"a {type(module).__name__}",
            "a ScriptModule",
            "Make one with amp_script.trace_and_freeze or amp_script.script; a function has to be "
            "the forward of a module to be saved",
        )
    path = to_path(path)
    extra_files = {}
    if isinstance(module, FrozenModule):
        module = module if compute is None else module.baked(compute)
    elif compute is None:
        extra_files[EXTRA_FILE] = _metadata_of_scripted(module).to_json()
    else:
        raise ArgumentError(
            "compute",
            f"{compute!r:.60}, which is for frozen modules",
            f"None for a {type(module).__name__}",
        )
    with replacing(path) as temporary:
        if not isinstance(module, FrozenModule):
            state = [*module.parameters(), *module.buffers()]
            require_room(temporary.parent, stored_bytes(module._c, state))
        try:
            module.save(str(temporary), _extra_files=extra_files)
        except RuntimeError as error:
            raise ArtifactError(str(path), f"cannot be written: {first_line(error)}") from error


def _metadata_of_scripted(module: torch.jit.ScriptModule) -> Metadata:
    """What is known about a program with parameters; its inputs may have any dtype and size."""
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    graphs = [module._c._get_method(name).inlined_graph for name in module._c._method_names()]
    return Metadata(
        "scripted",
        None,
        device,
        oldest_libtorch=oldest_libtorch(graphs),
        lite_interpreter=runs_in_lite_interpreter(graphs),
    )


@overload
def load(
    path: str | os.PathLike[str],
    *,
    like: type[M],
    compute: Compute = "auto",
    map_location: str | torch.device | None = None,
) -> M: ...
@overload
def load(
    path: str | os.PathLike[str],
    *,
    like: None = None,
    compute: Compute = "auto",
    map_location: str | torch.device | None = None,
) -> TypedScriptModule[..., Any]: ...
def load(
    path: str | os.PathLike[str],
    *,
    like: type[torch.jit.ScriptModule] | None = None,
    compute: Compute = "auto",
    map_location: str | torch.device | None = None,
) -> torch.jit.ScriptModule:
    """Load a file that :func:`save` wrote.

    Args:
        path: the file.
        like: a class that describes the module, by hand or from ``amp-script stubgen``: the type
            of what is returned, once the program has been compared with it.
        compute: plan to run it with; ``"auto"`` takes the one that suits this machine. A file with
            a plan baked in has no other.
        map_location: device to run a frozen program on: its constants are put there, and so are
            the tensors that it makes on the device that it was frozen on. Of a scripted program
            the parameters and buffers are put there, and devices that its source names stay.

    Returns:
        A :class:`FrozenModule` for a frozen program, else a plain ScriptModule.

    Raises:
        ArtifactError: the file is missing, damaged, or none of ours; the message names it.
        ArgumentError: the path is none, ``like`` is no class that describes a module, or there is
            no device ``map_location`` here.
        StubMismatchError: the program is not what ``like`` says.
        ValueError: there is no such plan for the program.
    """
    path = to_path(path)
    device = None if map_location is None else _present_device(map_location)
    metadata = read_metadata(path)
    _require_undamaged(path)
    wrap: Any = wrap_cpp_module  # which torch leaves untyped
    module: torch.jit.ScriptModule = wrap(_import(path, device))
    if like is not None:
        check(module, like)
    if metadata.kind == "scripted":
        return module
    if device is not None:
        move_devices(module._c, metadata.device, device)
        metadata = metadata.on_device(device.type)
    return FrozenModule.wrap(module, metadata, compute=compute)


def _present_device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ArgumentError(
            "map_location", f"{given!r:.60}", "a device that this machine has, such as 'cpu'"
        ) from error
    return device


def move_devices(cpp_module: CppModule, device_type: str, device: torch.device) -> None:
    """Let a frozen program name another device where it names the one that it was frozen on.

    A trace holds fast where the model put each tensor that it made, which is where its inputs were.
    """
    graphs = [cpp_module._get_method(name).graph for name in cpp_module._method_names()]
    for node in (node for graph in graphs for node in nodes_of(graph)):
        names_device = (
            node.kind() == "prim::Constant" and node.output().type().kind() == "DeviceObjType"
        )
        if names_device and constant(node.output()).type == device_type:
            node.s_("value", str(device))


def _import(path: Path, device: torch.device | None) -> CppModule:
    torch_c: Any = torch._C
    try:
        return torch_c.import_ir_module(torch_c.CompilationUnit(), str(path), device, {}, False)
    except MemoryError:
        raise
    except Exception as error:
        raise ArtifactError(str(path), f"cannot be loaded: {first_line(error)}") from error


def read_metadata(path: str | os.PathLike[str]) -> Metadata:
    """Read a file's metadata without loading its program.

    Raises:
        ArtifactError: the file is missing, damaged, or none of ours; the message names it.
        ArgumentError: the path is none.
    """
    path = to_path(path)
    metadata = metadata_if_any(path)
    if metadata is None:
        raise ArtifactError(
            str(path),
            "a TorchScript program, but not written by amp-script: it has no metadata",
            "Load it with torch.jit.load, make it a mixed-precision one with amp_script.lower, or "
            "look at it with `amp-script inspect`",
        )
    return metadata


def read_program(
    path: str | os.PathLike[str],
) -> tuple[torch.jit.ScriptModule, Metadata | None]:
    """Read a TorchScript file of anybody's to look at its program, on the CPU, without running it.

    Returns:
        The program as it is stored, and what the file says about itself; ``None`` for a file that
        this library did not write.

    Raises:
        ArtifactError: the file is missing, damaged, or no TorchScript program; the message names
            it.
    """
    path = Path(path)
    metadata = metadata_if_any(path)
    _require_undamaged(path)
    wrap: Any = wrap_cpp_module  # which torch leaves untyped
    return wrap(_import(path, torch.device("cpu"))), metadata


def metadata_if_any(path: Path) -> Metadata | None:
    """Read what a TorchScript file of anybody's says about itself, without loading the program.

    Raises:
        ArtifactError: the file is missing, damaged, or no TorchScript program; the message names
            it.
    """
    with _archive(path) as archive:
        members = {name.partition("/")[2]: name for name in archive.namelist()}
        if "constants.pkl" not in members:
            raise _no_program(path, {*members, *archive.namelist()})
        if f"extra/{EXTRA_FILE}" not in members:
            return None
        text = archive.read(members[f"extra/{EXTRA_FILE}"])
    try:
        return Metadata.from_json(text.decode())
    except ValueError as error:
        raise ArtifactError(str(path), f"unreadable metadata: {error}") from error


def _no_program(path: Path, members: Collection[str]) -> ArtifactError:
    for member, (kind, advice) in _OTHER_ARCHIVES.items():
        if member in members:
            return ArtifactError(str(path), f"{kind}, and no TorchScript program", advice)
    return ArtifactError(str(path), "a zip archive, but no TorchScript program")


_EXPORTED = (
    "a program of torch.export",
    "Read it with torch.export.load, and compare what its module() returns with amp_script.verify",
)
_OTHER_ARCHIVES: Final = {
    "archive_format": _EXPORTED,
    "serialized_exported_program.json": _EXPORTED,  # until torch 2.7
    "data.pkl": (
        "weights or a model that torch.save pickled",
        "Make the model in Python and freeze it, with `amp-script freeze` or "
        "amp_script.trace_and_freeze",
    ),
}
"""Other archives that torch writes: a part that tells each, what it is, and what to do with it."""


def _require_undamaged(path: Path) -> None:
    """Compare every part of an archive with its checksum, which TorchScript's reader does not."""
    with _archive(path) as archive:
        broken = archive.testzip()
    if broken is not None:
        raise ArtifactError(str(path), f"damaged: {broken} is not what was written")


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a file as the zip archive that a TorchScript file is; what fails is the file's fault."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except ArtifactError:
        raise
    except FileNotFoundError:
        raise MissingFileError(str(path), "no such file") from None
    except IsADirectoryError:
        raise ArtifactError(str(path), "a folder, not a file") from None
    except OSError as error:
        raise ArtifactError(str(path), f"cannot be read: {error.strerror or error}") from error
    except zipfile.BadZipFile as error:
        reason = "no TorchScript archive, or cut short" if path.stat().st_size else "empty"
        raise ArtifactError(str(path), f"{reason} ({error})") from error
    except _UNREADABLE as error:
        raise ArtifactError(str(path), f"damaged: {first_line(error)}") from error


_UNREADABLE = (EOFError, NotImplementedError, RuntimeError, ValueError, struct.error, zlib.error)
"""What else zipfile raises on damaged archives."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name in a new folder beside ``path`` that takes its place if the block succeeds.

    The name is the file's own, because TorchScript writes it into the archive. What a link points
    to is replaced, and not the link.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            raise ArtifactError(
                str(path), "a device, pipe or socket, which a file would take the place of"
            )
        with tempfile.TemporaryDirectory(prefix=".amp_script-", dir=target.parent) as folder:
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
