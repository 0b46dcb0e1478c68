"""Questions that a program asks about the autocast state it runs in.

TorchScript compiles three, and would answer each for the thread and not for the place in the
program. Each becomes the answer that eager mode gives there.
"""

from __future__ import annotations

import torch

from ._graph import Editor, Node, Value, constant, is_constant
from .state import ProgramState

QUERIES = frozenset(
    {"aten::is_autocast_enabled", "aten::is_autocast_cpu_enabled", "aten::get_autocast_dtype"}
)
"""The operators that ask. Without an argument, ``is_autocast_enabled`` asks about CUDA."""

_PICK = """
def pick(device: str, names: List[str], dtypes: List[int]) -> int:
    if device not in names:
        raise RuntimeError("no autocast on device type '" + device + "'")
    return dtypes[names.index(device)]
"""


def answer(editor: Editor, node: Node, state: ProgramState) -> None:
    """Replace a node whose kind is in :data:`QUERIES` by the answer."""
    if node.kind() == "aten::get_autocast_dtype":
        value = dtype_of(editor, node, node.inputsAt(0), state)
    else:
        device_type = "cpu" if node.kind() == "aten::is_autocast_cpu_enabled" else "cuda"
        value = as_value(editor, node, state.devices[device_type].enabled)
    node.output().replaceAllUsesWith(value)
    node.destroy()


def dtype_of(editor: Editor, node: Node, device: Value, state: ProgramState) -> Value:
    """The dtype of autocast on a device type, in the state, as a value before ``node``."""
    if is_constant(device) and constant(device) in state.devices:
        return as_value(editor, node, state.devices[constant(device)].dtype)
    names = editor.constant_before(node, list(state.devices))
    dtypes = editor.node_before(
        node,
        "prim::ListConstruct",
        *(as_value(editor, node, region.dtype) for region in state.devices.values()),
    ).output()
    dtypes.setType(torch._C.ListType(torch._C.IntType.get()))
    return editor.before(node, _PICK, device, names, dtypes)


def as_value(editor: Editor, node: Node, known: object) -> Value:
    """A value of the graph for something that may be known: itself, or a constant."""
    return known if isinstance(known, Value) else editor.constant_before(node, known)
