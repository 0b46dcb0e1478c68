"""Which plan suits which processor."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest
import torch

from amp_script.compute import Kind, Processor, choose, describe
from amp_script.compute.processor import ONEDNN_LEVELS, _allows, _onednn_limit
from amp_script.errors import ArgumentError

EVERY = frozenset(Kind)
PRODUCTS = EVERY - {Kind.RECURRENT}


def processor(*instructions: str, onednn: bool = True) -> Processor:
    return Processor("x86_64", frozenset(instructions), (), onednn)


@pytest.mark.parametrize(
    ("machine", "bfloat16", "float16"),
    [
        (processor("AVX2"), frozenset(), frozenset()),
        (processor("AVX2", "AVX-512"), frozenset(), frozenset()),
        (processor("AVX2", "AVX-512", "AVX-512 bf16"), EVERY, frozenset()),
        (processor("AVX2", "AVX-512", "AVX-512 bf16", "AMX bf16"), EVERY, frozenset()),
        (processor("AVX-512", "AVX-512 bf16", "AVX-512 fp16"), EVERY, EVERY),
        (processor("AMX bf16", "AMX fp16"), EVERY, PRODUCTS),
        (processor("Arm bf16"), PRODUCTS, frozenset()),
        (processor(), frozenset(), frozenset()),
        (processor("AVX-512", "AVX-512 bf16", onednn=False), frozenset(), frozenset()),
    ],
)
def test_kinds_with_fast_kernels(
    machine: Processor, bfloat16: frozenset[Kind], float16: frozenset[Kind]
) -> None:
    assert machine.native_kinds(torch.bfloat16) == bfloat16
    assert machine.native_kinds(torch.float16) == float16
    assert machine.native_kinds(torch.float32) == EVERY
    plan = choose("auto", "cpu", machine)
    assert plan.kinds[torch.bfloat16] == EVERY - bfloat16
    assert plan.kinds[torch.float16] == EVERY - float16
    assert plan.name == ("packed" if machine.onednn else "upcast")


def test_a_plan_that_is_asked_for_is_taken_on_every_processor() -> None:
    for machine in (processor("AVX2"), processor("AVX-512", "AVX-512 bf16", "AVX-512 fp16")):
        assert not choose("native", "cpu", machine).kinds
        for name in ("upcast", "packed"):
            plan = choose(name, "cpu", machine)
            assert plan.name == name
            assert set(plan.kinds.values()) == {EVERY}


def test_other_devices_run_natively() -> None:
    assert choose("auto", "cuda").name == "native"
    assert choose("native", "cuda").name == "native"
    with pytest.raises(ArgumentError, match=r"compute is 'upcast', which is for the CPU.*'cuda'"):
        choose("upcast", "cuda")


def test_an_unknown_plan_is_named() -> None:
    with pytest.raises(ArgumentError, match="'fast': expected one of auto, native, upcast, packed"):
        choose("fast", "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "limit"),
    [
        ({}, None),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "avx2"),
        ({"ONEDNN_MAX_CPU_ISA": "avx512_core_bf16"}, "avx512_core_bf16"),
        ({"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "avx512_core"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "avx2"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX10_1_512_AMX"}, "avx512_core_amx"),
        ({"ONEDNN_MAX_CPU_ISA": "ALL"}, None),
        ({"ONEDNN_MAX_CPU_ISA": "no such level"}, None),
    ],
)
def test_the_limit_on_onednn_is_read_as_onednn_reads_it(
    environment: Mapping[str, str], limit: str | None
) -> None:
    assert _onednn_limit(environment) == limit


def test_levels_are_ordered() -> None:
    for index, level in enumerate(ONEDNN_LEVELS):
        assert all(_allows(level, lower) for lower in ONEDNN_LEVELS[: index + 1])
        assert not any(_allows(level, higher) for higher in ONEDNN_LEVELS[index + 1 :])
        assert _allows(None, level)


LIMITED = """
import torch
from amp_script.compute import describe
description = describe()
print(sorted(description.processor.instructions))
print(len(description.slow_kinds(torch.bfloat16)))
print(description.processor.limits)
"""


@pytest.mark.parametrize(
    ("level", "allowed"),
    [("AVX2", {"AVX2"}), ("AVX512_CORE", {"AVX2", "AVX-512"})],
)
def test_a_limited_process_is_like_a_processor_without(level: str, allowed: set[str]) -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": level}
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    instructions, slow, limits = done.stdout.splitlines()
    assert set(ast.literal_eval(instructions)) <= allowed
    assert slow == str(len(Kind))
    assert f"ONEDNN_MAX_CPU_ISA={level}" in limits


def test_the_description_names_every_kind_once_for_each_dtype() -> None:
    description = describe()
    text = str(description)
    for dtype in (torch.bfloat16, torch.float16):
        native = description.processor.native_kinds(dtype)
        assert set(description.slow_kinds(dtype)) == EVERY - native
        assert set(description.plans[dtype]) == EVERY
    assert all(text.count(kind.value) == 2 for kind in Kind)
    assert description.processor.architecture in text
