"""The source that TorchScript is led to: the original's, in the region, line for line.

What TorchScript makes of it is tested in test_autocast_scripting.py.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json.decoder
import statistics
import types
import unittest.mock
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType, ModuleType

import pytest
import torch
import torch.nn.functional
import torch.nn.modules.transformer

from amp_script import autocast

MODULES = (
    argparse,
    dataclasses,
    inspect,
    json.decoder,
    statistics,
    types,
    unittest.mock,
    torch.nn.functional,
    torch.nn.modules.transformer,
)
"""Sources in many styles: decorators, overloads, long signatures, strings over several lines."""


def functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module defines, plain ones alone."""
    holders = [vars(module), *(vars(v) for v in vars(module).values() if inspect.isclass(v))]
    for holder in holders:
        for value in holder.values():
            function = getattr(value, "__func__", value)
            if (
                isinstance(function, FunctionType)
                and function.__module__ == module.__name__
                and not hasattr(function, "__wrapped__")
                and not function.__code__.co_flags & inspect.CO_GENERATOR
            ):
                yield function


@cache
def definitions(file: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Return a file's function definitions by name and first line, decorators included."""
    with open(file) as source:
        tree = ast.parse(source.read())
    return {
        (node.name, min(part.lineno for part in (node, *node.decorator_list))): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }


def places(nodes: list[ast.stmt], offset: int = 0) -> list[tuple[str, int]]:
    return [
        (type(part).__name__, part.lineno + offset)
        for node in nodes
        for part in ast.walk(node)
        if hasattr(part, "lineno")
    ]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_body_is_the_originals_in_the_region_and_in_its_place(module: ModuleType) -> None:
    compared = 0
    for function in functions(module):
        key = function.__name__, function.__code__.co_firstlineno
        original = definitions(module.__file__ or "").get(key)
        if original is None:
            continue
        lines, number = inspect.getsourcelines(autocast("cpu")(function))
        (twin,) = ast.parse("".join(lines)).body
        assert isinstance(twin, ast.FunctionDef)
        assert twin.name == original.name
        assert ast.dump(twin.args) == ast.dump(original.args)
        assert twin.decorator_list == []
        (region,) = twin.body
        assert isinstance(region, ast.With)
        assert list(map(ast.dump, region.body)) == list(map(ast.dump, original.body))
        assert places(region.body, number - 1) == places(original.body)
        compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("dtype", "enabled", "line"),
    [
        (torch.bfloat16, True, "autocast('cpu', AMP_SCRIPT_TORCH.bfloat16, True)"),
        (torch.float16, False, "autocast('cpu', AMP_SCRIPT_TORCH.float16, False)"),
    ],
)
def test_the_region_is_written_in_literals(dtype: torch.dtype, enabled: bool, line: str) -> None:
    @autocast("cpu", dtype, enabled)
    def function() -> None: ...

    assert f"with AMP_SCRIPT_TORCH.{line}:" in inspect.getsource(function)


def test_the_file_and_the_signature_are_the_originals() -> None:
    def function(a: int, *, b: str = "b") -> None:
        """Do nothing."""

    decorated: Callable[..., None] = autocast("cpu")(function)
    assert inspect.getsourcefile(decorated) == __file__
    assert inspect.signature(decorated) == inspect.signature(function)
    assert inspect.unwrap(decorated).__name__ == "function"


def test_decorating_needs_no_source() -> None:
    """Nothing is read until it is asked for."""
    namespace: dict[str, object] = {}
    exec("def function(): pass", namespace)
    function = namespace["function"]
    assert isinstance(function, FunctionType)
    decorated = autocast("cpu")(function)
    with pytest.raises(OSError, match="source"):
        inspect.getsource(decorated)
