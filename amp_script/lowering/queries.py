"""Questions that a program asks about the autocast state it runs in.

TorchScript compiles three, and would answer each for the thread and not for the place in the
program. Each becomes the answer that eager mode gives there.
"""

from __future__ import annotations

import torch

from ._graph import Editor, Node, Value, constant, is_constant
from .helpers import helper
from .state import OFF, ProgramState

QUERIES = frozenset(
    {"aten::is_autocast_enabled", "aten::is_autocast_cpu_enabled", "aten::get_autocast_dtype"}
)
"""The operators that ask; ``is_autocast_enabled``, without an argument here, about CUDA."""


def answer(editor: Editor, node: Node, state: ProgramState) -> None:
    """Replace a node whose kind is in :data:`QUERIES` by the answer."""
    if node.kind() == "aten::get_autocast_dtype":
        value = dtype_of(editor, node, node.inputsAt(0), state)
    else:
        device_type = "cpu" if node.kind() == "aten::is_autocast_cpu_enabled" else "cuda"
        target = state.devices[device_type].target
        if isinstance(target, int):
            value = editor.constant_before(node, target != OFF)
        else:
            value = editor.call_before(node, helper("is_on"), target)
    node.output().replaceAllUsesWith(value)
    node.destroy()


def dtype_of(editor: Editor, node: Node, device: Value, state: ProgramState) -> Value:
    """The dtype of autocast on a device type, in the state, as a value before ``node``."""
    if is_constant(device) and constant(device) in state.devices:
        return editor.value_before(node, state.devices[constant(device)].dtype)
    names = editor.constant_before(node, list(state.devices))
    dtypes = editor.list_before(
        node,
        torch._C.IntType.get(),
        [editor.value_before(node, region.dtype) for region in state.devices.values()],
    )
    return editor.call_before(node, helper("dtype_of"), device, names, dtypes)
