"""Which sizes values have on the example inputs: one run of the program on zeros tells.

Private names used here, present in torch 2.6 to 2.15: ``torch._C._create_function_from_graph``.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from amp_script.lowering._graph import Editor, Graph, Value, constant, is_constant, nodes_of
from amp_script.metadata import InputSpec

from .constants import return_free_memory
from .dtypes import cast_dtype, input_name
from .templates import insert

__all__ = ["sizes_on_examples"]

_SIZE = """
def size(x: Tensor) -> List[int]:
    return x.size()
"""


_FREE_SIZES: Final = (8, 64)
"""What a size that the specs leave free is taken for: the first with which the program runs. Small,
because the run is part of loading; the larger is for convolutional nets, which shrink images."""


def sizes_on_examples(
    graph: Graph, cpp_module: Any, inputs: Sequence[InputSpec], names: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Run a program on zeros of the example inputs' sizes, and return the sizes of some values.

    The program's state and the random generator stay as they are.

    Args:
        graph: the program's ``forward``; it is left as it is.
        cpp_module: what the graph's first input stands for.
        inputs: specs of the other inputs.
        names: tensors to measure. Those inside a branch or a loop are left out.

    Returns:
        Sizes by name; nothing at all where an input is not known or the program does not take
        zeros, such as one that checks its inputs.
    """
    free = any(None in (spec.shape or ()) for spec in inputs)
    schema = cpp_module._get_method("forward").schema
    try:
        examples = [
            [_Example(inputs, schema, size).of(value) for value in list(graph.inputs())[1:]]
            for size in (_FREE_SIZES if free else _FREE_SIZES[:1])
        ]
    except LookupError:
        return {}
    probe = graph.copy()
    # A copy numbers its values anew, so that they correspond by their order alone.
    pairs = zip(_results(graph), _results(probe), strict=True)
    found = {of.debugName(): value for of, value in pairs if of.debugName() in names}
    _return_sizes(probe, list(found.values()))
    weights = _take_weights_as_inputs(probe)
    _copy_written_constants(probe)
    function = torch._C._create_function_from_graph("sizes", probe)
    try:
        for arguments in examples:
            with torch.no_grad(), torch.random.fork_rng([]), contextlib.suppress(RuntimeError):
                # What a frozen program holds beside its constants is what it changes.
                sizes = function(copy.deepcopy(cpp_module), *arguments, *weights)
                return {name: tuple(size) for name, size in zip(found, sizes, strict=True)}
    finally:
        del function, examples, weights
        return_free_memory()
    return {}


def _results(graph: Graph) -> list[Value]:
    return [value for node in graph.nodes() for value in node.outputs()]


def _take_weights_as_inputs(graph: Graph) -> list[torch.Tensor]:
    """Make inputs of the constants that are cast to float32; returns zeros to pass for them.

    Sizes do not depend on weights, so all of them share the memory of the largest.
    """
    shapes: list[torch.Size] = []
    for node in nodes_of(graph):
        if cast_dtype(node) is torch.float32 and is_constant(node.inputsAt(0)):
            shapes.append(constant(node.inputsAt(0)).shape)
            node.output().replaceAllUsesWith(graph.addInput())
            node.destroy()
    memory = torch.zeros(max((shape.numel() for shape in shapes), default=0))
    return [memory[: shape.numel()].view(shape) for shape in shapes]


def _copy_written_constants(graph: Graph) -> None:
    """Let a graph write to constants of its own: a copy of a graph shares their memory."""
    aliases: Any = graph.alias_db()
    editor = Editor(graph)
    for node in graph.findAllNodes("prim::Constant"):
        if aliases.has_writers(node.output()):
            own = editor.constant_before(node, copy.deepcopy(constant(node.output())))
            node.output().replaceAllUsesWith(own)
            node.destroy()


def _return_sizes(graph: Graph, values: Sequence[Value]) -> None:
    """Make a graph return a tuple of the sizes of the values."""
    editor = Editor(graph)
    end = graph.return_node()
    sizes = [insert(editor, end, _SIZE, value) for value in values]
    result = editor.node_before(end, "prim::TupleConstruct", *sizes).output()
    result.setType(torch._C.TupleType([size.type() for size in sizes]))
    for _ in list(graph.outputs()):
        graph.eraseOutput(0)
    graph.registerOutput(result)
    torch._C._jit_pass_dce(graph)


class _Example:
    """Zeros for an input of any type, by the specs of the tensors in it, or its default."""

    def __init__(
        self, inputs: Sequence[InputSpec], schema: torch._C.FunctionSchema, free_size: int
    ) -> None:
        self._free_size = free_size
        self._specs: Mapping[str, InputSpec] = {spec.name: spec for spec in inputs}
        self._defaults = {
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        }

    def of(self, value: Value) -> Any:
        name = input_name(value)
        if name in self._defaults:
            return self._defaults[name]
        return self._make(value.type(), name)

    def _make(self, kind: Any, path: str) -> Any:
        if kind.kind() == "TensorType":
            spec = self._specs[path]
            if spec.dtype is None or spec.shape is None:
                raise LookupError(path)
            sizes = [self._free_size if size is None else size for size in spec.shape]
            return torch.zeros(sizes, dtype=spec.dtype)
        if kind.kind() == "TupleType":
            parts = enumerate(kind.elements())
            return tuple(self._make(part, f"{path}[{index}]") for index, part in parts)
        if kind.kind() == "ListType":
            return [self._make(kind.getElementType(), inner) for inner in self._inside(path)]
        if kind.kind() == "DictType":
            return {
                ast.literal_eval(inner[len(path) + 1 : -1]): self._make(kind.getValueType(), inner)
                for inner in self._inside(path)
            }
        raise LookupError(path)

    def _inside(self, path: str) -> list[str]:
        """Paths of the items of a list or dictionary, in order."""
        item = re.compile(re.escape(path) + r"\[('[^']*'|\d+)\]")
        found = [match.group() for name in self._specs if (match := item.match(name))]
        return list(dict.fromkeys(found))
