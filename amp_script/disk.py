"""Files as their callers name them, and room on the disk, asked for before TorchScript writes one.

TorchScript's writer ends the process if the disk is full: its destructor raises. So the room that a
file needs is taken first, where a failure is an ``OSError``, and given back right before writing.

Private names used here, present in torch 2.6 to 2.15: the C++ module's ``_method_names`` and
``_get_method``.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import torch

from amp_script.errors import ArgumentError
from amp_script.lowering._graph import Graph, constant, nodes_of

__all__ = ["require_room", "stored_bytes", "to_path"]

_PROGRAM_BYTES: Final = 1 << 20
"""Room for what is no tensor: the code, its source map, and the archive's directory."""

_PART_BYTES: Final = 512
"""Room for the header and padding of each tensor in the archive."""


class _CppMethod(Protocol):
    @property
    def inlined_graph(self) -> Graph: ...


class _CppModule(Protocol):
    def _method_names(self) -> list[str]: ...
    def _get_method(self, name: str) -> _CppMethod: ...


def to_path(path: object) -> Path:
    """The path that a caller named a file by.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(path, (str, os.PathLike)) and isinstance(text := os.fspath(path), str):
        if "\0" not in text:
            return Path(text)
        raise ArgumentError("path", repr(text), "a name without null characters")
    advice = (
        "os.fsdecode(path) makes one"
        if isinstance(path, bytes)
        else "For an open file give its name; a module's save_to_buffer() returns what it holds"
    )
    raise ArgumentError("path", f"{path!r:.60}", "a str or a pathlib.Path", advice)


def stored_bytes(cpp_module: _CppModule, state: Iterable[torch.Tensor] = ()) -> int:
    """Return how many bytes a module's file has at most.

    Args:
        cpp_module: the C++ module, with all its constants.
        state: its parameters and buffers.
    """
    graphs = [cpp_module._get_method(name).inlined_graph for name in cpp_module._method_names()]
    nodes = (node for graph in graphs for node in nodes_of(graph))
    held = (constant(node.output()) for node in nodes if node.kind() == "prim::Constant")
    parts = [part for value in held for part in (value if isinstance(value, list) else [value])]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*parts, *state)
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values()) + _PART_BYTES * len(storages) + _PROGRAM_BYTES


def require_room(folder: Path, size: int) -> None:
    """Have the disk say whether a file of this many bytes fits into a folder.

    Raises:
        OSError: it does not fit, or the folder cannot be written to.
    """
    with tempfile.TemporaryFile(dir=folder) as probe:
        try:
            os.posix_fallocate(probe.fileno(), 0, size)
        except (AttributeError, OSError) as error:
            # Not every system, and not every kind of disk, reserves room.
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            if shutil.disk_usage(folder).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
