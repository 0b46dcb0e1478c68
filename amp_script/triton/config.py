"""``config.pbtxt``: a model's configuration, in the text format of protocol buffers.

The fields are those of ``ModelConfig`` in
https://github.com/triton-inference-server/common/blob/main/protobuf/model_config.proto.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from amp_script.triton.border import DATA_TYPES, Border, Port

__all__ = ["KINDS", "config"]

KINDS: Final[Mapping[str, str]] = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}
"""Triton's names of the device types that a model's instances run on."""


def config(name: str, border: Border, max_batch_size: int, device_type: str) -> str:
    """Return the text of the file.

    Args:
        name: the model's, and its folder's.
        border: inputs and outputs.
        max_batch_size: 0, or how many rows may be in a batch, which is then the first dimension of
            each input and output and not listed.
        device_type: a key of :data:`KINDS`. An instance on another device than the program's would
            move its constants there, and not the devices that the program names.
    """
    unlisted = 1 if max_batch_size else 0
    return "\n".join(
        [
            f"name: {_text(name)}",
            'backend: "pytorch"',
            'platform: "pytorch_libtorch"',
            f"max_batch_size: {max_batch_size}",
            *(_port("input", port, unlisted) for port in border.inputs),
            *(_port("output", port, unlisted) for port in border.outputs),
            f"instance_group [ {{ kind: {KINDS[device_type]} }} ]",
            "",
        ]
    )


def _port(field: str, port: Port, unlisted: int) -> str:
    sizes = ["-1" if size is None else str(size) for size in port.sizes[unlisted:]]
    # Triton has no tensors without dimensions beside the batch, and asks for one of size 1.
    reshape = "" if sizes else "    reshape: { shape: [ ] }\n"
    return (
        f"{field} [\n"
        "  {\n"
        f"    name: {_text(port.name)}\n"
        f"    data_type: {DATA_TYPES[port.dtype]}\n"
        f"    dims: [ {', '.join(sizes or ['1'])} ]\n"
        f"{reshape}"
        "  }\n"
        "]"
    )


def _text(value: str) -> str:
    """A string, of which JSON escapes what the text format does, in the same way."""
    return json.dumps(value, ensure_ascii=False)
