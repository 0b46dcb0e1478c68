"""What the processor can do: which operators have kernels in a reduced dtype.

oneDNN runs matrix products, convolutions, attention and recurrent layers in bfloat16 or float16
only with the matching instructions; without them PyTorch falls back to loops that are 5 to 40 times
slower than float32. The instructions found are those that the kernels will use: a limit that the
environment puts on oneDNN (``ONEDNN_MAX_CPU_ISA``) counts. ``ATEN_CPU_CAPABILITY`` limits
element-wise kernels only, whose reduced-precision versions are fast on every processor, so it
changes no plan; it is reported.

Private names used here, present in torch 2.6 to 2.15: ``torch.cpu._is_avx512_bf16_supported``,
``torch.cpu._is_amx_tile_supported``, ``torch._C._has_mkldnn``, ``torch._C._get_mkldnn_enabled``,
the operators ``mkldnn::_is_mkldnn_bf16_supported`` and ``mkldnn::_is_mkldnn_fp16_supported``;
``torch.cpu._is_amx_fp16_supported`` from 2.7.
"""

from __future__ import annotations

import enum
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["NATIVE", "Kind", "Processor"]


class Kind(enum.Enum):
    """A kind of operator, each with kernels of its own."""

    MATMUL = "matrix products"
    CONVOLUTION = "convolutions"
    ATTENTION = "attention"
    RECURRENT = "recurrent layers"


ONEDNN_LEVELS: Final = (
    "sse41",
    "avx",
    "avx2",
    "avx2_vnni",
    "avx2_vnni_2",
    "avx512_core",
    "avx512_core_vnni",
    "avx512_core_bf16",
    "avx512_core_fp16",
    "avx512_core_amx",
    "avx512_core_amx_fp16",
)
"""Values of ``ONEDNN_MAX_CPU_ISA`` from least to most, after oneDNN's documentation of its run-time
dispatch (https://uxlfoundation.github.io/oneDNN/dev_guide_cpu_dispatcher_control.html)."""

_SAME_LEVEL: Final[Mapping[str, str]] = {
    "avx10_1_512": "avx512_core_fp16",
    "avx10_1_512_amx": "avx512_core_amx",
    "avx10_1_512_amx_fp16": "avx512_core_amx_fp16",
}

_NEEDED_LEVEL: Final[Mapping[str, str]] = {
    "AVX2": "avx2",
    "AVX-512": "avx512_core",
    "AVX-512 bf16": "avx512_core_bf16",
    "AVX-512 fp16": "avx512_core_fp16",
    "AMX bf16": "avx512_core_amx",
    "AMX fp16": "avx512_core_amx_fp16",
}

NATIVE: Final[Mapping[torch.dtype, Mapping[str, frozenset[Kind]]]] = {
    torch.bfloat16: {
        "AVX-512 bf16": frozenset(Kind),
        "AMX bf16": frozenset(Kind),
        "Arm bf16": frozenset({Kind.MATMUL, Kind.CONVOLUTION, Kind.ATTENTION}),
    },
    torch.float16: {
        "AVX-512 fp16": frozenset(Kind),
        "AMX fp16": frozenset({Kind.MATMUL, Kind.CONVOLUTION, Kind.ATTENTION}),
    },
}
"""Kinds of operator that have fast kernels in a dtype, by the instructions that they need.

oneDNN has recurrent layers in float16 for AVX-512 fp16 and none for Arm
(https://uxlfoundation.github.io/oneDNN/dev_guide_rnn.html)."""


@dataclass(frozen=True)
class Processor:
    """The instructions that kernels will use on this machine.

    Attributes:
        architecture: such as ``"x86_64"`` or ``"aarch64"``.
        instructions: names such as ``"AVX-512 bf16"``, limits taken off.
        limits: environment variables that limit kernels, as ``"NAME=value"``.
        onednn: whether oneDNN is built in and switched on.
    """

    architecture: str
    instructions: frozenset[str]
    limits: tuple[str, ...]
    onednn: bool

    @classmethod
    def detect(cls) -> Processor:
        """Ask the processor, PyTorch and the environment."""
        level = _onednn_limit(os.environ)
        found = {
            name
            for name, present in _instructions().items()
            if present and (name not in _NEEDED_LEVEL or _allows(level, _NEEDED_LEVEL[name]))
        }
        names = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
        limits = tuple(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        return cls(
            platform.machine(),
            frozenset(found),
            limits,
            bool(torch._C._has_mkldnn and torch._C._get_mkldnn_enabled()),
        )

    def native_kinds(self, dtype: torch.dtype) -> frozenset[Kind]:
        """Kinds of operator that have fast kernels in ``dtype``; all of them for float32."""
        if dtype not in NATIVE:
            return frozenset(Kind)
        if not self.onednn:
            return frozenset()
        rows = NATIVE[dtype]
        return frozenset().union(*(rows[name] for name in self.instructions & rows.keys()))


def _onednn_limit(environment: Mapping[str, str]) -> str | None:
    """The level that oneDNN is limited to; it ignores case and values that it does not know."""
    value = environment.get("ONEDNN_MAX_CPU_ISA", environment.get("DNNL_MAX_CPU_ISA", "")).lower()
    value = _SAME_LEVEL.get(value, value)
    return value if value in ONEDNN_LEVELS else None


def _allows(limit: str | None, needed: str) -> bool:
    return limit is None or ONEDNN_LEVELS.index(limit) >= ONEDNN_LEVELS.index(needed)


def _instructions() -> dict[str, bool]:
    onednn = torch.ops.mkldnn
    bf16 = bool(onednn._is_mkldnn_bf16_supported())
    fp16 = bool(onednn._is_mkldnn_fp16_supported())
    arm = platform.machine().lower() in ("aarch64", "arm64")
    amx = torch.cpu._is_amx_tile_supported()
    amx_fp16 = getattr(torch.cpu, "_is_amx_fp16_supported", lambda: False)()
    return {
        "AVX2": torch.cpu._is_avx2_supported(),
        "AVX-512": torch.cpu._is_avx512_supported(),
        "AVX-512 bf16": bf16 and torch.cpu._is_avx512_bf16_supported(),
        "AVX-512 fp16": fp16 and torch.cpu._is_avx512_supported(),
        "AMX bf16": bf16 and amx,
        "AMX fp16": fp16 and amx_fp16,
        "Arm bf16": bf16 and arm,
    }
