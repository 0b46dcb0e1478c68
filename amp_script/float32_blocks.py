"""Submodules that stay in float32 in a model that runs under autocast, without touching the model.

In a block ``with autocast(device, enabled=False)`` eager code computes in the dtypes that it is
given, and an input in lower precision would meet float32 weights there, which raises. So a user
writes two things, the block and the casts of what comes in; here they are put around the
``forward`` of submodules that are named from outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from amp_script.errors import ArgumentError, SubmoduleError
from amp_script.jit_state import AmbientState
from amp_script.structure import map_tensors
from amp_script.submodules import Names, called_from_python, forward_replaced, matching, names_of

__all__ = ["Float32Blocks", "keep_float32"]

_LOWER: Final = (torch.bfloat16, torch.float16)


@contextmanager
def keep_float32(model: object, *patterns: str) -> Iterator[None]:
    """Keep submodules in float32 while a model runs under autocast in the calling thread.

    Inside the block each call of a submodule that a pattern matches runs as if its ``forward`` were
    written ::

        with autocast(device_type, enabled=False):
            return forward(*arguments_in_float32)

    for every device type on which autocast is on at that moment. Tensors in bfloat16 or float16
    among the arguments, nested ones included, are cast to float32; all else stays as it is, weights
    and results too. Regions that the submodule enters itself count as ever. Its hooks run outside
    of the block, and so does other code that reads its weights or calls another of its methods.

    The model is not touched: calls from other threads run as ever, and so does what
    ``torch.compile`` or TorchScript has made of it, which is to be made outside of the block. Where
    a backward runs a part of the model again, as with checkpoints, it belongs into the block too.

    Args:
        model: a module, or a function that runs modules.
        patterns: dotted names of submodules, or patterns of them as for file names: ``"*"`` also
            matches dots, so that ``"encoder.*"`` is everything inside of ``encoder``. ``""`` is
            the model itself. A module with several names is kept wherever it is called.

    Raises:
        SubmoduleError: a pattern matches nothing, or what it matches is compiled into a
            ScriptModule that is not kept.

    Warns:
        UserWarning: nothing that a pattern matches was called in the block.
    """
    blocks = Float32Blocks.select(model, patterns)
    with blocks.enter() as ran:
        yield
    for unused in blocks.unused(ran):
        warnings.warn(str(unused), stacklevel=3)


@dataclass(frozen=True)
class Float32Blocks:
    """Submodules that are kept in float32.

    Attributes:
        patterns: what names them.
        modules: for each pattern the modules to stand in for.
        names: of all modules of the model.
    """

    patterns: tuple[str, ...]
    modules: Mapping[str, Sequence[nn.Module]]
    names: Names

    @classmethod
    def select(cls, model: object, patterns: Sequence[str]) -> Float32Blocks:
        """Find the submodules that patterns name; see :func:`keep_float32`.

        Raises:
            SubmoduleError: see :func:`keep_float32`.
            ArgumentError: ``patterns`` is no list of strings.
        """
        if isinstance(patterns, str):
            raise ArgumentError("keep_float32", repr(patterns), f"a list, [{patterns!r}]")
        wrong = next((pattern for pattern in patterns if not isinstance(pattern, str)), None)
        if wrong is not None:
            raise ArgumentError(
                "keep_float32", f"a list with {wrong!r:.60} in it", "names of submodules"
            )
        if not patterns:
            return cls((), {}, {})
        names, reachable = names_of(model), called_from_python(model)
        found = {pattern: matching(pattern, names) for pattern in patterns}
        matched = {module for modules in found.values() for module in modules}
        covered = {part for module in matched & reachable for part in module.modules()}
        for pattern, modules in found.items():
            for module in modules:
                if module not in covered:
                    raise SubmoduleError(
                        pattern,
                        f"{names[module][0]!r} is compiled into a ScriptModule, which Python "
                        "cannot see into; keep the whole ScriptModule, or put a block with "
                        "autocast(enabled=False) into its source",
                    )
        kept = {
            pattern: [module for module in modules if module in reachable]
            for pattern, modules in found.items()
        }
        return cls(tuple(patterns), kept, names)

    @contextmanager
    def enter(self) -> Iterator[Set[nn.Module]]:
        """Keep them in the calling thread, inside the block; yields those that have run so far."""
        ran: set[nn.Module] = set()

        def run(
            module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            ran.add(module)
            with _autocast_off():
                positional: Any = map_tensors(args, _in_float32, "args")
                named: Any = map_tensors(kwargs, _in_float32, "kwargs")
                return forward(*positional, **named)

        kept = {module for modules in self.modules.values() for module in modules}
        with forward_replaced(kept, run):
            yield ran

    def unused(self, ran: Set[nn.Module]) -> Iterator[SubmoduleError]:
        """What is wrong with patterns that changed nothing, as no module of theirs was called."""
        for pattern, modules in self.modules.items():
            if modules and ran.isdisjoint(modules):
                kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
                yield SubmoduleError(
                    pattern,
                    f"the model calls nothing that it matches ({kinds}), so it would keep nothing "
                    "in float32; name the module whose forward does the computing, which is one "
                    "inside a ModuleList, and the one outside where weights are only read",
                )

    def require_ran(self, ran: Set[nn.Module]) -> None:
        """Refuse a pattern that changed nothing.

        Raises:
            SubmoduleError: names the pattern and the modules that it matches.
        """
        for unused in self.unused(ran):
            raise unused

    def require_unused(self, names: Set[str], method: str) -> None:
        """Refuse modules that a method calls which is compiled, and does not keep them.

        Args:
            names: dotted names of the submodules that it calls.
            method: its name.

        Raises:
            SubmoduleError: names a pattern that matches one, and the method.
        """
        for pattern, modules in self.modules.items():
            both = names & {name for module in modules for name in self.names[module]}
            if both:
                raise SubmoduleError(
                    pattern,
                    f"method {method!r} is compiled by scripting and calls {min(both)!r}, which "
                    "Python cannot keep in float32 there; put a block with autocast(enabled=False) "
                    "into the source",
                )


@contextmanager
def _autocast_off() -> Iterator[None]:
    with ExitStack() as stack:
        for device_type, state in AmbientState.current().devices:
            if state.enabled:
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _in_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOWER else tensor
