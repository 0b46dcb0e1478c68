"""Compiling a module with TorchScript types of its own.

TorchScript keeps one type for all modules that look alike, with one body for each method, in a
table for the whole process. A module whose methods are changed after they were compiled must not
share them with others, or a later plain ``torch.jit.script`` of the same class would get the
changed ones; but its own parts that look alike should share theirs, or a model of twelve equal
layers would be compiled twelve times.

Private names used here, present in torch 2.6 to 2.15: ``torch.jit._recursive`` with
``ConcreteTypeStore``, ``concrete_type_store``, ``create_script_module``,
``infer_methods_to_compile``.
"""

from __future__ import annotations

import threading

import torch
from torch.jit import _recursive

__all__ = ["compile_module"]

_lock = threading.RLock()


class _OneThreadsTypes(_recursive.ConcreteTypeStore):  # type: ignore[misc]  # torch's is untyped
    """Types for what one thread compiles; other threads keep the process's table."""

    def __init__(self, others: _recursive.ConcreteTypeStore) -> None:
        self._own = _recursive.ConcreteTypeStore()
        self._others = others
        self._thread = threading.get_ident()

    def _store(self) -> _recursive.ConcreteTypeStore:
        return self._own if threading.get_ident() == self._thread else self._others

    @property
    def type_store(self) -> object:
        return self._store().type_store

    @property
    def methods_compiled(self) -> object:
        return self._store().methods_compiled

    def get_or_create_concrete_type(self, nn_module: torch.nn.Module) -> object:
        return self._store().get_or_create_concrete_type(nn_module)


def compile_module(module: torch.nn.Module) -> torch.jit.RecursiveScriptModule:
    """Do what ``torch.jit.script(module)`` does, with types that nothing else has."""
    with _lock:
        before = _recursive.concrete_type_store
        _recursive.concrete_type_store = _OneThreadsTypes(before)
        try:
            compiled: torch.jit.RecursiveScriptModule = _recursive.create_script_module(
                module, _recursive.infer_methods_to_compile
            )
        finally:
            _recursive.concrete_type_store = before
    return compiled
