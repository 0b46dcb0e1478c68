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
            if node.kind() != "prim::CallMethod":
                continue
            call = (*path, *_path(node.inputsAt(0))), str(node.s("name"))
            if call not in seen:
                seen.add(call)
                pending.append(call)
    return found


def _path(module: Value) -> tuple[str, ...]:
    """Names of the attributes that lead to a module from the method's own."""
    node = module.node()
    if node.kind() != "prim::GetAttr":
        return ()
    return (*_path(node.input()), str(node.s("name")))


def _at(cpp_module: CppModule, path: tuple[str, ...]) -> CppModule:
    for name in path:
        cpp_module = cpp_module.getattr(name)
    return cpp_module
