"""``precision_report``: which operator of a program works in which dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from amp_script.compatibility import (
    oldest_libtorch,
    runs_in_lite_interpreter,
    unrecorded_operators,
)
from amp_script.compute import CppModule
from amp_script.errors import ArgumentError
from amp_script.frozen import FrozenModule
from amp_script.metadata import Metadata
from amp_script.scripting import LoweredModule

from .flat import flatten
from .model import Cast, Needs, Operator, PrecisionReport, Weights
from .reading import Reading
from .weights import constants_of, state_of, weigh

__all__ = ["Cast", "Needs", "Operator", "PrecisionReport", "Weights", "precision_report"]


def precision_report(
    module: torch.jit.ScriptModule, *, metadata: Metadata | None = None
) -> PrecisionReport:
    """Say which operator of a program works in which dtype, and what casts are left in it.

    The program is read, and not run. A dtype is said where it follows from the program: from
    weights, from what is known about the inputs, from casts, and through operators that keep or
    promote what they are given. Everywhere else it is unknown, inside regions too that are left to
    the JIT's autocast pass. What :func:`amp_script.script` returned is described as it runs outside
    every region of its caller.

    Args:
        module: what ``trace_and_freeze``, ``load`` or ``script`` returned, or any other
            ScriptModule.
        metadata: what is known about the module; a frozen module brings its own.

    Raises:
        ArgumentError: ``module`` is no ScriptModule.
    """
    if not isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            "module",
            f"a {type(module).__name__}",
            "a torch.jit.ScriptModule",
            "Make one with amp_script.script or trace_and_freeze",
        )
    if metadata is None and isinstance(module, FrozenModule):
        metadata = module.metadata
    with _storable(module) as cpp_module:
        flats = flatten(cpp_module, is_lowered=_is_lowered(module, metadata))
        operators: list[Operator] = []
        casts: list[Cast] = []
        left_out = 0
        for flat in flats:
            specs = metadata.inputs if metadata is not None and flat.name == "forward" else ()
            reading = Reading.of(flat, specs)
            casts += reading.casts(len(operators))
            operators += reading.operators(len(operators))
            left_out += reading.gradient_operators
        graphs = [graph for flat in flats for graph in (flat.graph, *flat.helpers.values())]
        return PrecisionReport(
            name=str(module.original_name),
            kind="scripted" if cpp_module.hasattr("training") else "frozen",
            operators=tuple(operators),
            casts=tuple(casts),
            weights=weigh([*constants_of(graphs), *state_of(cpp_module)]),
            compute=_plan(module, metadata),
            planned=module.planned if isinstance(module, FrozenModule) else 0,
            gradient_operators=left_out,
            metadata=metadata,
            needs=Needs(
                oldest_libtorch(graphs),
                runs_in_lite_interpreter([flat.graph for flat in flats]),
                unrecorded_operators(graphs),
            ),
        )


@contextmanager
def _storable(module: torch.jit.ScriptModule) -> Iterator[CppModule]:
    """The C++ module, with all its constants inside the block."""
    if isinstance(module, FrozenModule):
        with module.storable() as cpp_module:
            yield cpp_module
    else:
        yield module._c


def _is_lowered(module: torch.jit.ScriptModule, metadata: Metadata | None) -> bool:
    """Whether lowering may have put the bodies of submodules into their callers'."""
    is_scripted = metadata is not None and metadata.kind == "scripted"
    return isinstance(module, LoweredModule) or is_scripted


def _plan(module: torch.jit.ScriptModule, metadata: Metadata | None) -> str | None:
    if isinstance(module, FrozenModule):
        return module.compute
    return metadata.compute if metadata is not None and metadata.kind == "frozen" else None
