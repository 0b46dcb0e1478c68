"""Random programs with regions, branches, loops and mixed dtypes, against eager mode.

Hypothesis makes a program as text, with every value in float32, bfloat16, float16 or float64, and
inputs that may be leaves with gradients, and exits anywhere: ``return``, ``break`` and ``continue``
out of regions, branches and loops. It runs eagerly and scripted, outside and inside ambient
autocast: dtypes, bits, gradients and whether it raises must be the same. CI runs a fixed corpus,
the same every time. To look for more, by hand:

    AMP_SCRIPT_RANDOM_PROGRAMS=5000 pytest tests/test_random_programs.py
"""

from __future__ import annotations

import linecache
import os
import re
import types
from itertools import count
from typing import Any

import pytest
import torch
from agreement import AMBIENT, ambient_autocast, assert_same
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import amp_script

EXAMPLES = int(os.environ.get("AMP_SCRIPT_RANDOM_PROGRAMS", "0"))
"""How many new programs to look at; 0 for the corpus of CI."""

VARIABLES = ("a", "b", "c")

ONE = st.sampled_from(VARIABLES)

EXPRESSIONS = st.one_of(
    st.builds("torch.mm({}, {})".format, ONE, ONE),
    st.builds("torch.nn.functional.linear({}, {}, {}[0])".format, ONE, ONE, ONE),
    st.builds("torch.addmm({}, {}, {})".format, ONE, ONE, ONE),
    st.builds("torch.baddbmm({}[None], {}[None], {}[None])[0]".format, ONE, ONE, ONE),
    st.builds("torch.cat([{}, {}])[1:4]".format, ONE, ONE),
    st.builds("torch.stack([{}, {}])[1]".format, ONE, ONE),
    st.builds("({} + {}) / 2".format, ONE, ONE),
    st.builds("{} * 0.5".format, ONE),
    st.builds("torch.tanh({})".format, ONE),
    st.builds("torch.sigmoid({})".format, ONE),
    st.builds("torch.relu({}).t()".format, ONE),
    st.builds("torch.softmax({}, -1)".format, ONE),
    st.builds("{}.float()".format, ONE),
    st.builds("{}.to({}.dtype)".format, ONE, ONE),
    st.builds("torch.prod({}) + {}".format, ONE, ONE),
    st.builds("torch.nn.functional.mse_loss({}, {}) + {}".format, ONE, ONE, ONE),
    *[st.builds("helper({}, {})".format, ONE, ONE)] * 3,  # that it is compiled amid a region
)

REGIONS = st.sampled_from(
    [
        'torch.autocast("cpu", dtype=torch.bfloat16)',
        'torch.autocast("cpu", dtype=torch.float16)',
        'torch.autocast("cpu", enabled=False)',
        'torch.autocast("cpu", enabled=n > 1, dtype=torch.bfloat16)',
        'torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)',
        "chosen",
        "torch.no_grad()",
    ]
)

HELPER = """
def helper(x: torch.Tensor, y: torch.Tensor):
    with torch.autocast("cpu", enabled=torch.is_autocast_cpu_enabled(), dtype=torch.bfloat16):
        return torch.mm(x, y) * 2
"""


CONDITIONS = st.one_of(
    st.builds("{}.sum() > 0".format, ONE),
    st.sampled_from(["n > 0", "n == 2", "steps > 2", "steps % 2 == 0"]),
)

EXITS = st.one_of(
    st.sampled_from(["break", "continue", "return seen"]),
    st.builds("return seen + [{}]".format, EXPRESSIONS),
)


def _indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def _blocks(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    body = st.lists(inner, min_size=1, max_size=3).map(lambda parts: [x for p in parts for x in p])
    return st.one_of(
        st.builds(lambda region, lines: [f"with {region}:", *_indented(lines)], REGIONS, body),
        st.builds(
            lambda condition, lines, other: [
                f"if {condition}:",
                *_indented(lines),
                "else:",
                *_indented(other),
            ],
            CONDITIONS,
            body,
            body,
        ),
        st.builds(
            lambda condition, lines, way_out: [f"if {condition}:", *_indented([*lines, way_out])],
            CONDITIONS,
            body,
            EXITS,
        ),
        st.builds(lambda lines: ["for _ in range(n):", *_indented(lines)], body),
        st.builds(
            lambda condition, lines: [
                f"while steps < 6 and bool({condition}):",
                *_indented(["steps = steps + 1", *lines]),
            ],
            CONDITIONS,
            body,
        ),
    )


def _leaving_loops_only(lines: list[str]) -> list[str]:
    """Exits of a loop that stand in none return instead."""
    loops: list[int] = []
    kept = []
    for line in lines:
        text = line.lstrip()
        depth = len(line) - len(text)
        loops = [loop for loop in loops if loop < depth]
        if text in ("break", "continue") and not loops:
            line = line[:depth] + "return seen"
        if text.startswith(("for ", "while ")):
            loops.append(depth)
        kept.append(line)
    return kept


# TorchScript leaves out what nothing uses, with the error that it would have raised.
ASSIGNMENT = st.builds(
    lambda name, value: [f"{name} = {value}", f"seen.append({name})"], ONE, EXPRESSIONS
)
STATEMENTS = st.lists(st.recursive(ASSIGNMENT, _blocks, max_leaves=6), min_size=2, max_size=5).map(
    lambda parts: [line for part in parts for line in part]
)

DTYPES = st.sampled_from([torch.float32] * 3 + [torch.bfloat16, torch.float16, torch.float64])

_numbers = count()


def _without_regions(statements: list[str]) -> list[str]:
    return [re.sub(r"with .*:$", "if True:", line) for line in statements]


def _program(statements: list[str], in_module: bool) -> Any:
    """Compile a program from text that TorchScript can read again.

    Args:
        statements: its lines.
        in_module: make it a module's forward, and the helper that it calls another method.
    """
    body = [
        "def program(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, n: int):",
        '    on = torch.autocast("cpu", dtype=torch.bfloat16)',
        '    off = torch.autocast("cpu", enabled=False)',
        "    chosen = on if n > 1 else off",
        "    seen = [a, b, c]",
        "    steps = 0",
        *_indented(_leaving_loops_only(statements)),
        "    return seen",
    ]
    lines = [*HELPER.splitlines(), *body]
    if in_module:
        method = re.compile(r"(def \w+\()")
        lines = [method.sub(r"\1self, ", line) for line in lines]
        lines = [re.sub(r"(?<!def )\bhelper\(", "self.helper(", line) for line in lines]
        lines = [line.replace("def program", "def forward") for line in lines]
        lines = ["class Program(torch.nn.Module):", *_indented(lines)]
    text = "\n".join(["import torch", *lines, ""])
    name = f"<random program {next(_numbers)}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    module = types.ModuleType("random_program")
    exec(compile(text, name, "exec"), vars(module))
    return module.Program() if in_module else module.program


def _run(program: Any, dtypes: list[torch.dtype], grads: list[bool], n: int) -> Any:
    """Results and gradients, or that there are none."""
    generator = torch.Generator().manual_seed(0)
    inputs = [
        (torch.rand(3, 3, generator=generator) - 0.4).to(dtype).requires_grad_(grad)
        for dtype, grad in zip(dtypes, grads, strict=True)
    ]
    try:
        results = program(*inputs, n)
        loss = sum(result.double().nan_to_num().clamp(-99, 99).sum() for result in results)
        if loss.requires_grad:
            loss.backward()
    except (RuntimeError, torch.jit.Error):
        return "raises"
    gradients = [each.grad for each in inputs if each.grad is not None]
    return [each.detach().nan_to_num() for each in (*results, *gradients)]


@pytest.mark.parametrize("in_module", [False, True])
@pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled:DeprecationWarning")
@settings(
    max_examples=EXAMPLES or 120,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    statements=STATEMENTS,
    dtypes=st.lists(DTYPES, min_size=3, max_size=3),
    grads=st.lists(st.booleans(), min_size=3, max_size=3),
    n=st.integers(0, 3),
)
def test_random_programs(
    in_module: bool, statements: list[str], dtypes: list[torch.dtype], grads: list[bool], n: int
) -> None:
    program = _program(statements, in_module)
    scripted = amp_script.script(program)
    for ambient in AMBIENT:
        for _ in range(2):
            with ambient_autocast(ambient):
                want = _run(program, dtypes, grads, n)
            with ambient_autocast(ambient):
                got = _run(scripted, dtypes, grads, n)
            try:
                assert_same(got, want)
            except AssertionError:
                if _torchscript_is_wrong(statements, dtypes, n):
                    reject()
                raise


def _torchscript_is_wrong(statements: list[str], dtypes: list[torch.dtype], n: int) -> bool:
    """Whether TorchScript, which has bugs in loops with exits, differs without any region too."""
    plain = _program(_without_regions(statements), in_module=False)
    grads = [False] * len(dtypes)
    want, got = _run(plain, dtypes, grads, n), _run(torch.jit.script(plain), dtypes, grads, n)
    try:
        assert_same(got, want)
    except AssertionError:
        return True
    return False
