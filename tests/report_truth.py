"""Dtypes that a report says, against those that a run of the same program has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_script.lowering._graph import Editor, is_tensor, nodes_of
from amp_script.metadata import InputSpec
from amp_script.report.flat import flatten
from amp_script.report.reading import Reading


@dataclass(frozen=True)
class Comparison:
    """What a program says of its tensors against what they are.

    Attributes:
        wrong: lines that name what the program says otherwise than it is.
        known: of how many tensors it says the dtype.
        kinds: kinds of the operators of whose results it says the dtype.
        seen: how many were compared.
    """

    wrong: list[str]
    known: int
    kinds: set[str]
    seen: int


def compare(
    cpp_module: Any, inputs: Sequence[object], specs: Sequence[InputSpec] = (), method: str = ""
) -> Comparison:
    """Run a program so that it returns every tensor that it makes outside branches and loops."""
    flat = next(each for each in flatten(cpp_module) if each.name == (method or "forward"))
    reading = Reading.of(flat, specs)
    values = [
        value
        for node in flat.graph.block().nodes()
        for value in node.outputs()
        if is_tensor(value) and node.kind() != "prim::Constant"
    ]
    dtypes = reading.dtypes
    said = [(v.node().kind(), dtypes.of(v), dtypes.dimensions.has(v)) for v in values]
    kinds = {
        node.kind()
        for node in nodes_of(flat.graph)
        if any(dtypes.of(value) is not None for value in node.outputs())
    }
    assert not any(node.kind() == "prim::CallMethod" for node in nodes_of(flat.graph))
    editor = Editor(flat.graph)
    made = editor.node_before(flat.graph.return_node(), "prim::TupleConstruct", *values).output()
    made.setType(torch._C.TupleType([value.type() for value in values]))
    for _ in list(flat.graph.outputs()):
        flat.graph.eraseOutput(0)
    flat.graph.registerOutput(made)
    function: Any = torch._C._create_function_from_graph("values", flat.graph)
    function._set_ignore_amp(True)
    with torch.no_grad():
        tensors = function(cpp_module, *inputs)
    wrong = []
    for (kind, dtype, has), tensor in zip(said, tensors, strict=True):
        if dtype not in (None, tensor.dtype):
            wrong.append(f"{kind}: {dtype}, and it is {tensor.dtype}")
        if has not in (None, tensor.dim() > 0):
            wrong.append(f"{kind}: has dimensions: {has}, and it has {tensor.dim()}")
    known = sum(dtype is not None for _, dtype, _ in said)
    return Comparison(wrong, known, kinds, len(said))
