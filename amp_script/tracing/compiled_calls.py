"""What submodules a method that is compiled by scripting calls.

Private names used here, present in torch 2.6 to 2.15: of the C++ module ``_get_method`` and
``getattr``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from amp_script.lowering._graph import Value, nodes_of

__all__ = ["submodules_called_by"]

CppModule: TypeAlias = Any
"""A ``torch._C.ScriptModule``, most of whose methods torch's stubs lack."""


def submodules_called_by(cpp_module: CppModule, method: str) -> set[str]:
    """Dotted names of the submodules whose ``forward`` a method calls, at any depth."""
    found: set[str] = set()
    pending: list[tuple[tuple[str, ...], str]] = [((), method)]
    seen = set(pending)
    while pending:
        path, name = pending.pop()
        if path and name == "forward":
            found.add(".".join(path))
        for node in nodes_of(_at(cpp_module, path)._get_method(name).graph):
            called = _path(node.inputsAt(0)) if node.kind() == "prim::CallMethod" else None
            if called is None:
                continue
            call = (*path, *called), str(node.s("name"))
            if call not in seen:
                seen.add(call)
                pending.append(call)
    return found


def _path(value: Value) -> tuple[str, ...] | None:
    """Names of the attributes that lead to an object from the method's own module.

    None where it is no part of that, such as an object that the method makes.
    """
    node = value.node()
    if node.kind() == "prim::GetAttr":
        owner = _path(node.input())
        return None if owner is None else (*owner, str(node.s("name")))
    is_self = node.kind() == "prim::Param" and value.debugName() == next(node.outputs()).debugName()
    return () if is_self else None


def _at(cpp_module: CppModule, path: tuple[str, ...]) -> CppModule:
    for name in path:
        cpp_module = cpp_module.getattr(name)
    return cpp_module
