"""Compute plans: which kernels a program uses on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import torch

from amp_script.dtypes import dtype_name
from amp_script.errors import ArgumentError

from .processor import Kind, Processor
from .upcast import REDUCED

__all__ = ["Compute", "Description", "Plan", "choose", "describe"]

Compute: TypeAlias = Literal["auto", "native", "upcast", "packed"]
"""What a caller asks for."""

_NAMES: Final = ("auto", "native", "upcast", "packed")


@dataclass(frozen=True)
class Plan:
    """Which operators run in float32, and how.

    Attributes:
        name: ``"native"``: none, every operator has its reduced-precision kernel. ``"upcast"``:
            those in ``kinds`` take and give rounded values in float32 kernels, with the same bits
            in C++. ``"packed"``: the same, with weights reordered for this processor when loaded;
            sums are taken in another order, so bits differ from ``"upcast"`` as those of any two
            float32 kernels do.
        kinds: kinds of operator that run in float32, by the dtype that they work on.
    """

    name: Literal["native", "upcast", "packed"]
    kinds: Mapping[torch.dtype, frozenset[Kind]]


def choose(compute: Compute, device_type: str, processor: Processor | None = None) -> Plan:
    """The plan for a device, decided by the processor where the caller asks for ``"auto"``.

    Args:
        compute: what the caller asks for.
        device_type: where the program runs; plans other than native are for the CPU.
        processor: the machine's, looked up if not given.

    Raises:
        ArgumentError: no such plan, or none for the device.
    """
    if compute not in _NAMES:
        raise ArgumentError("compute", f"{compute!r:.60}", f"one of {', '.join(_NAMES)}")
    if device_type != "cpu":
        if compute in ("auto", "native"):
            return Plan("native", {})
        raise ArgumentError(
            "compute",
            f"{compute!r}, which is for the CPU",
            f"'native' or 'auto' for a program on {device_type!r}",
        )
    if compute == "native":
        return Plan("native", {})
    if compute != "auto":
        return Plan(compute, dict.fromkeys(REDUCED, frozenset(Kind)))
    processor = processor or Processor.detect()
    slow = {dtype: frozenset(Kind) - processor.native_kinds(dtype) for dtype in REDUCED}
    return Plan("packed" if processor.onednn else "upcast", slow)


@dataclass(frozen=True)
class Description:
    """What this machine has and what ``compute="auto"`` makes of it.

    Attributes:
        processor: the instructions that kernels will use.
        plans: the plan that ``auto`` takes, by dtype and kind of operator.
    """

    processor: Processor
    plans: Mapping[torch.dtype, Mapping[Kind, str]]

    def slow_kinds(self, dtype: torch.dtype) -> tuple[Kind, ...]:
        """Kinds of operator that have no fast kernels in ``dtype``, so that the recipe of tracing
        under autocast and freezing would be slow.
        """
        return tuple(kind for kind, plan in self.plans.get(dtype, {}).items() if plan != "native")

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, for a table."""
        processor = self.processor
        rows = [
            ("processor", processor.architecture),
            ("instructions", ", ".join(sorted(processor.instructions)) or "none of those known"),
            ("limits", ", ".join(processor.limits) or "none"),
            ("oneDNN", "on" if processor.onednn else "off"),
        ]
        for dtype, plans in self.plans.items():
            by_plan: dict[str, list[str]] = {}
            for kind, plan in plans.items():
                by_plan.setdefault(plan, []).append(kind.value)
            shown = [f"{plan} for {', '.join(names)}" for plan, names in by_plan.items()]
            rows.append((dtype_name(dtype), "; ".join(shown)))
        return rows

    def __str__(self) -> str:
        """A few lines for people."""
        return "\n".join(f"{name}: {value}" for name, value in self.rows())


def describe() -> Description:
    """What this machine has, and which plan ``compute="auto"`` takes on it."""
    processor = Processor.detect()
    plan = choose("auto", "cpu", processor)
    return Description(
        processor,
        {
            dtype: {kind: plan.name if kind in slow else "native" for kind in Kind}
            for dtype, slow in plan.kinds.items()
        },
    )
