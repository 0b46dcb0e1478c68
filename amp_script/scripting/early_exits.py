"""Early exits as TorchScript can compile them where regions follow.

It fails an assertion of its own on a ``with`` block after a branch that returns, breaks or
continues, and on such a branch inside of one. It compiles the same with what follows in an
``else``, which does the same: after the branch nothing else is run.
"""

from __future__ import annotations

import ast
import copy

__all__ = ["with_else_after_exits"]


def with_else_after_exits(tree: ast.Module) -> ast.Module:
    """Put what follows a branch that always leaves into the other branch, if there are regions.

    Args:
        tree: a function definition; it stays as it is.
    """
    if not any(isinstance(node, ast.With) for node in ast.walk(tree)):
        return tree
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        # Bodies come before what is in them, so that what is moved is looked at in its new place.
        for name in ("body", "orelse"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                _move_into_other_branch(statements)
    return tree


def _move_into_other_branch(statements: list[ast.stmt]) -> None:
    for index, statement in enumerate(statements):
        if not isinstance(statement, ast.If):
            continue
        if _leaves(statement.body):
            other = statement.orelse
        elif _leaves(statement.orelse):
            other = statement.body
        else:
            continue
        other += statements[index + 1 :]
        del statements[index + 1 :]
        return


def _leaves(statements: list[ast.stmt]) -> bool:
    """Whether what stands after the statements, in the block around them, is never run."""
    match statements[-1:]:
        case [ast.Return() | ast.Break() | ast.Continue()]:
            return True
        case [ast.With(body=body)]:
            return _leaves(body)
        case [ast.If(body=body, orelse=orelse)]:
            return _leaves(body) and _leaves(orelse)
    return False
