"""Which submodules to keep in float32: found by running the model with some of them kept.

What a submodule adds itself says where to look. What it is worth to keep it says only a run: an
error may vanish on the way, a result in float32 may overflow in the next layer, and code around a
submodule may not take float32 from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import nn

from amp_script.accuracy.difference import Difference, difference
from amp_script.accuracy.report import LARGEST_SHARE, Advice
from amp_script.accuracy.runs import Outputs, Runs, SubmoduleCall
from amp_script.errors import ComparisonError
from amp_script.float32_blocks import Float32Blocks

__all__ = ["advise", "inside"]

_TRIED_AT_A_LEVEL: Final = 4
"""How many of the submodules that one module calls are tried, those that add most."""

_ROUNDS: Final = 4
"""How many times the layers are compared again to find where numbers are lost next."""


def inside(call: SubmoduleCall) -> SubmoduleCall | None:
    """The call directly inside of one in which its own error comes to be, if it is a single one."""
    worst = max(call.parts, key=lambda part: part.own or Difference(), default=None)
    if call.own is None or worst is None or worst.own is None:
        return None
    if call.own.nonfinite or worst.own.nonfinite:
        return worst if worst.own.nonfinite else None
    return worst if worst.own.relative >= call.own.relative / 2 > 0 else None


def advise(
    runs: Runs,
    kept: Float32Blocks,
    calls: Sequence[SubmoduleCall],
    before: Difference,
    full: Outputs,
    after_run: Callable[[], None],
) -> Advice:
    """Find the smallest submodules that make the result much better where they stay in float32.

    Args:
        runs: of the model.
        kept: what is kept already.
        calls: how they compare.
        before: how far the result is from float32.
        full: the result in float32.
        after_run: called after each run.
    """
    trials = _Trials(runs, kept, full, after_run)
    if before.nonfinite:
        blocks, remaining = _where_numbers_are_lost(trials, calls, before)
    else:
        blocks, remaining = _where_precision_is_lost(trials, calls, before)
    names = tuple(runs.name(module) for module in blocks)
    return Advice(names, before, remaining, _share(calls, blocks), trials.count)


class _Trials:
    """Runs of a model under autocast with some modules kept in float32."""

    def __init__(
        self, runs: Runs, kept: Float32Blocks, full: Outputs, after_run: Callable[[], None]
    ) -> None:
        self.runs = runs
        self._kept = kept
        self._full = full
        self._after_run = after_run
        self.count = 0

    def blocks(self, modules: Sequence[nn.Module]) -> Float32Blocks:
        """These modules and those that are kept anyway."""
        own = {self.runs.name(module): [module] for module in modules}
        patterns = (*self._kept.patterns, *own)
        return Float32Blocks(patterns, {**self._kept.modules, **own}, self.runs.names)

    def run(self, modules: Sequence[nn.Module]) -> Difference | None:
        """How far the result is from float32; None where the model fails so."""
        self.count += 1
        try:
            return difference(self.runs.reduced(self.blocks(modules)), self._full)
        except ComparisonError:
            return None  # the model's own code does not take float32 from them
        finally:
            self._after_run()

    def compared(self, modules: Sequence[nn.Module]) -> list[SubmoduleCall]:
        """All calls, compared anew."""
        self.count += 1
        calls, _, _ = self.runs.compared(self.blocks(modules), lambda done, total: None)
        self._after_run()
        return calls


def _where_numbers_are_lost(
    trials: _Trials, calls: Sequence[SubmoduleCall], before: Difference
) -> tuple[list[nn.Module], Difference]:
    """Keep the innermost calls that give infinities or NaN, until the result has none."""
    blocks: list[nn.Module] = []
    remaining = before
    for _ in range(_ROUNDS):
        losing = [call for call in calls if call.own is not None and call.own.nonfinite]
        innermost = [call for call in losing if inside(call) is None]
        blocks, now = _kept_with(trials, blocks, innermost)
        if now is None:
            break
        remaining = now
        if not remaining.nonfinite:
            return _needed(trials, blocks, remaining)
        calls = trials.compared(blocks)
    return (blocks, remaining) if remaining < before else ([], before)


def _kept_with(
    trials: _Trials, blocks: Sequence[nn.Module], calls: Sequence[SubmoduleCall]
) -> tuple[list[nn.Module], Difference | None]:
    """Keep the modules of calls too; where the model does not take it, those that call them."""
    while True:
        more = [call.module for call in calls if call.module not in blocks]
        kept = list(dict.fromkeys([*blocks, *more]))
        if len(kept) == len(blocks):
            return kept, None
        now = trials.run(kept)
        if now is not None:
            return kept, now
        calls = [call.caller for call in calls if call.caller is not None]


def _needed(
    trials: _Trials, blocks: list[nn.Module], remaining: Difference
) -> tuple[list[nn.Module], Difference]:
    """Those of the blocks without which numbers are lost."""
    for block in blocks if len(blocks) > 1 else []:
        fewer = [module for module in blocks if module is not block]
        now = trials.run(fewer)
        if now is not None and not now.nonfinite and now.relative <= 2 * remaining.relative:
            blocks, remaining = fewer, now
    return blocks, remaining


def _where_precision_is_lost(
    trials: _Trials, calls: Sequence[SubmoduleCall], before: Difference
) -> tuple[list[nn.Module], Difference]:
    """Go from the model inwards, to the smallest block that takes away half of the error."""
    blocks: list[nn.Module] = []
    remaining = before
    caller: nn.Module | None = None
    while before.relative:
        tried = [
            (now, module)
            for module in _callees(calls, caller)
            if (now := trials.run([module])) is not None and now < before
        ]
        if not tried:
            break
        # Of blocks that do nearly the same, the first, which adds most itself.
        goal = before.relative - 0.9 * (before.relative - min(now for now, _ in tried).relative)
        now, module = next(pair for pair in tried if pair[0].relative <= goal)
        enough = now.relative <= before.relative / 2
        if enough or not blocks or _share(calls, blocks) > LARGEST_SHARE:
            blocks, remaining = [module], now
        if not enough:
            break
        caller = module
    return blocks, remaining


def _callees(calls: Sequence[SubmoduleCall], caller: nn.Module | None) -> list[nn.Module]:
    """The modules that a module, or no module, calls directly, those that add most first."""
    worst: dict[nn.Module, Difference] = {}
    for call in calls:
        called_by = None if call.caller is None else call.caller.module
        if called_by is caller and call.module is not caller and call.own is not None:
            worst[call.module] = max(call.own, worst.get(call.module, Difference()))
    return sorted(worst, key=lambda module: worst[module], reverse=True)[:_TRIED_AT_A_LEVEL]


def _share(calls: Sequence[SubmoduleCall], blocks: Sequence[nn.Module]) -> float:
    """Which part of what runs in lower precision, by the number of weights, lies in blocks."""
    inside_blocks = {part for module in blocks for part in module.modules()}
    lossy = {call.module for call in calls if call.own is not None and call.own != Difference()}
    sizes = {module: sum(p.numel() for p in module.parameters(recurse=False)) for module in lossy}
    held = sum(size for module, size in sizes.items() if module in inside_blocks)
    return held / (sum(sizes.values()) or 1)
