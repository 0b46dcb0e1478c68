"""``Any`` is mentioned where something untyped comes in, torch's internals first of all."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

PACKAGE = Path(__file__).parents[1] / "amp_script"

GRAPHS = "graphs, nodes, types and schemas of TorchScript, of which torch's stubs lack much"
CPP_MODULES = "C++ modules, of which torch's stubs know two methods"
ARGUMENTS = "what is passed to a module's forward and comes back, which torch types as Any"

REASONS: Final[dict[str, str]] = {
    "accuracy/runs.py": ARGUMENTS,
    "artifact.py": "torch.jit's wrapper of C++ modules; a file of which nobody has said the types",
    "autocast_mode.py": "TorchScript's name for a parameter that may be anything",
    "cli/contestants.py": "what torch.compile returns, and packages that may be missing",
    "cli/inputs.py": GRAPHS,
    "compatibility.py": CPP_MODULES,
    "compute/constants.py": "arguments of operators that pack weights, which are in no stub",
    "compute/dtypes.py": GRAPHS,
    "compute/prepack.py": GRAPHS,
    "compute/program.py": CPP_MODULES,
    "compute/sizes.py": GRAPHS,
    "compute/templates.py": GRAPHS,
    "compute/upcast.py": GRAPHS,
    "exporting.py": "what torch.export takes for dynamic shapes",
    "float32_blocks.py": ARGUMENTS,
    "frozen.py": "methods of ScriptModule, which torch leaves untyped; " + CPP_MODULES,
    "lowering/_graph.py": GRAPHS,
    "lowering/casts.py": "nodes of autograd",
    "lowering/composites/expand.py": GRAPHS,
    "lowering/composites/registry.py": GRAPHS,
    "lowering/composites/tracing.py": GRAPHS,
    "lowering/functions.py": GRAPHS,
    "lowering/regions.py": GRAPHS,
    "made_inputs.py": GRAPHS,
    "report/flat.py": GRAPHS,
    "report/rules.py": GRAPHS,
    "report/weights.py": GRAPHS,
    "scripting/cast_cache.py": "TorchScript's dictionaries, typed by what is in them",
    "scripting/compilation.py": "torch.jit's compiler, whose functions are untyped",
    "scripting/lowered.py": "methods of ScriptModule, which torch leaves untyped; " + CPP_MODULES,
    "scripting/programs.py": GRAPHS,
    "scripting/script_calls.py": GRAPHS,
    "structure.py": GRAPHS,
    "stubgen/conformance.py": "Any itself, as an annotation that is compared",
    "stubgen/program.py": GRAPHS,
    "tracer.py": "torch's tracer, which is in no stub",
    "tracing/batch_norm.py": GRAPHS,
    "tracing/compiled_calls.py": CPP_MODULES,
    "tracing/constants.py": CPP_MODULES,
    "tracing/freezing.py": "TorchScript's passes, most of which are in no stub",
    "tracing/gradient_paths.py": GRAPHS,
    "tracing/missing_kernels.py": "torch's tracer, which is in no stub",
    "tracing/python_operators.py": "operators of torch.library, which are found by name",
    "tracing/recording.py": "torch.jit's tracer and its modules, which are untyped",
    "tracing/specialise.py": "TorchScript's passes, most of which are in no stub",
    "triton/adapter.py": "torch.jit's compiler, whose functions are untyped",
    "triton/border.py": GRAPHS,
    "triton/repository.py": "methods of ScriptModule, which torch leaves untyped",
    "untouched.py": CPP_MODULES + "; keys of mappings that a model holds",
}
"""Each module that may mention ``Any``, and what it holds that has no types."""


def test_modules_mention_any_for_a_reason_alone() -> None:
    mentioning = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if mentions_any(file.read_text(encoding="utf-8"))
    }
    unexplained = sorted(mentioning - REASONS.keys())
    assert unexplained == [], "say `object`, a TypeVar or a Protocol, or what is untyped there"
    assert sorted(REASONS.keys() - mentioning) == [], "no reason is needed any more"


def mentions_any(source: str) -> bool:
    """Whether a module names ``Any`` in its code; strings and comments do not count."""
    return any(
        (isinstance(node, ast.Name) and node.id == "Any")
        or (isinstance(node, ast.Attribute) and node.attr == "Any")
        or (isinstance(node, ast.Constant) and _is_annotation_with_any(node.value))
        for node in ast.walk(ast.parse(source))
    )


def _is_annotation_with_any(value: object) -> bool:
    """Whether a string is an alias or annotation in quotes, such as ``"Callable[..., Any]"``."""
    return isinstance(value, str) and value.endswith((", Any]", "[Any]"))


@pytest.mark.parametrize(
    ("source", "mentions"),
    [
        ("from typing import Any\n\ndef f(x: Any) -> None: ...", True),
        ("import typing\nx: list[typing.Any]", True),
        ('Compiled = "torch._C.ScriptFunction[..., Any]"', True),
        ('"""Any text."""\nx = 1  # Any', False),
    ],
)
def test_what_counts_as_mentioning_any(source: str, mentions: bool) -> None:
    assert mentions_any(source) is mentions
