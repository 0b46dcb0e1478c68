"""Decorated functions as TorchScript compiles them: the same source, its body in the region.

TorchScript does not compile what a decorator returns. It takes the source of the function that
``inspect.unwrap`` leads to, and looks names up in the globals and closure of the function that it
was given; so a decorator is dropped without a word. The functions made here lead it to a *twin*
instead. The twin's source is the original's, with ``with autocast(...):`` around the body, and each
line of the body where it was. Decorated function and twin both have the original's globals and
closure, and the names that this line uses. A twin that is called, calls what was decorated.

The source is made when it is asked for, through :mod:`linecache`. Where a region cannot be written
as source, TorchScript finds a function that it refuses to compile, for the reason it gives.

Private names used here, tried on torch 2.6, 2.13 and 2.14: the function attributes
``__script_unsupported`` and ``__prepare_scriptable__``, which TorchScript looks for, and
``torch._jit_internal._qualified_name``.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import tokenize
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch._jit_internal import _qualified_name

from amp_script.dtypes import dtype_name
from amp_script.errors import DecoratorError

__all__ = ["Function", "Region", "decorate_function", "refuse"]

Function = Callable[..., object]
Region = AbstractContextManager[object, bool | None]

_REGION_NAMES = tuple(
    f"__torch__.torch.{module}.autocast_mode.autocast" for module in ("amp", "cpu.amp", "cuda.amp")
)
"""The classes that TorchScript's autocast pass takes for regions, by qualified name."""

_OF_OTHERS = (
    "__original_fn",
    "__prepare_scriptable__",
    "__script_if_tracing_wrapper",
    "_torchdynamo_inline",
    "_torchdynamo_orig_callable",
)
"""Attributes by which TorchScript and Dynamo find what a wrapper stands for, and would not find the
region. ``functools.wraps`` copies them from what is decorated."""


_CODE = """\
def make({names}):
    def in_region(*{args}, **{kwargs}):
        with AMP_SCRIPT_AUTOCAST: return AMP_SCRIPT_FUNC(*{args}, **{kwargs})
        {names}
    def twin(*{args}, **{kwargs}):
        return AMP_SCRIPT_FUNC(*{args}, **{kwargs})
        {names}
    return in_region.__code__, twin.__code__
"""


def decorate_function(region: Region, func: Function) -> Function:
    """Return a function that calls ``func`` in ``region``, and that TorchScript compiles so.

    Args:
        region: a context manager that may be entered again, nested and from many threads.
        func: any object that can be called.
    """
    original = inspect.unwrap(func)
    original = getattr(original, "__func__", original)
    known = isinstance(func, (types.FunctionType, types.MethodType))
    if not (known and isinstance(original, types.FunctionType)):
        return _decorate_other(region, func)

    refusal = getattr(func, "__script_unsupported", None) or _refusal(region)
    line = "AMP_SCRIPT_REFUSE()" if refusal else _with_line(region)
    cells = dict(zip(original.__code__.co_freevars, original.__closure__ or (), strict=True))
    cells |= {
        "AMP_SCRIPT_FUNC": types.CellType(func),
        "AMP_SCRIPT_AUTOCAST": types.CellType(region),
        "AMP_SCRIPT_REFUSE": types.CellType(_refusing(refusal)),
        "AMP_SCRIPT_TORCH": types.CellType(torch),
    }
    in_region_code, twin_code = _codes(tuple(cells))

    in_region = _function(_placed(in_region_code, original), cells, original, func)
    twin = _function(_with_source(twin_code, original, line), cells, original, func)
    del twin.__dict__["__wrapped__"]
    twin.__dict__["__signature__"] = inspect.signature(func)
    in_region.__dict__["__wrapped__"] = twin
    return refuse(in_region, refusal) if refusal else in_region


def refuse(function: Function, reason: str) -> Function:
    """Have TorchScript refuse a function, and return it.

    Args:
        function: one that takes attributes.
        reason: what TorchScript's error says.
    """
    vars(function)["__script_unsupported"] = reason
    return function


def _decorate_other(region: Region, func: Function) -> Function:
    @functools.wraps(func)
    def in_region(*args: object, **kwargs: object) -> object:
        with region:
            return func(*args, **kwargs)

    return refuse(
        in_region,
        f"autocast decorates a {_name(type(func))} here, and TorchScript needs the source of a "
        "function: decorate the function that does the work, such as a module's forward",
    )


def _refusal(region: Region) -> str | None:
    if _qualified_name(type(region)) in _REGION_NAMES:
        return None
    return (
        "TorchScript compiles functions decorated with amp_script.autocast or torch.autocast, and "
        f"not with {_name(type(region))}"
    )


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _refusing(reason: str | None) -> Function:
    """Return a function that TorchScript asks for what to compile, and gets an error."""

    def prepare() -> NoReturn:
        raise DecoratorError(f"TorchScript error: {reason}")

    def refuse() -> None: ...

    refuse.__prepare_scriptable__ = prepare  # type: ignore[attr-defined]  # functions take attributes
    return refuse


def _with_line(region: Region) -> str:
    """Return the line that makes and enters ``region``, in literals: TorchScript has no others."""
    assert isinstance(region, torch.amp.autocast_mode.autocast)  # others have a refusal
    dtype = dtype_name(region.fast_dtype)
    arguments = f"{region.device!r}, AMP_SCRIPT_TORCH.{dtype}, {region._enabled}"
    return f"with AMP_SCRIPT_TORCH.autocast({arguments}):"


@functools.cache
def _codes(names: tuple[str, ...]) -> tuple[types.CodeType, types.CodeType]:
    """Return the code of a decorated function and of a twin, with ``names`` in their closures.

    The names stand after the return: the compiler drops what is never run, but closes over it.
    """
    # torch.compile names the inputs of its graph after arguments, and after places in the closure.
    # So arguments have the names that they have in torch's decorator, if these are free, and the
    # names that are added to the closure stand first in it, in the order in which torch's stand.
    args, kwargs = (f"amp_script_{n}" if n in names else n for n in ("args", "kwargs"))
    code = _CODE.format(names=", ".join(names), args=args, kwargs=kwargs)
    namespace: dict[str, Callable[..., tuple[types.CodeType, types.CodeType]]] = {}
    exec(compile(code, __file__, "exec"), namespace)
    return namespace["make"](*names)


def _function(
    code: types.CodeType,
    cells: dict[str, types.CellType],
    original: types.FunctionType,
    func: Function,
) -> types.FunctionType:
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(code, original.__globals__, func.__name__, None, closure)
    functools.update_wrapper(made, func)
    for name in _OF_OTHERS:
        made.__dict__.pop(name, None)
    return made


def _placed(in_region: types.CodeType, original: types.FunctionType) -> types.CodeType:
    """Return the code, said to be where the original is: TorchScript shows that in its errors."""
    return in_region.replace(
        co_filename=original.__code__.co_filename,
        co_firstlineno=original.__code__.co_firstlineno,
        co_name=original.__name__,
    )


def _with_source(twin: types.CodeType, original: types.FunctionType, line: str) -> types.CodeType:
    """Return the code, said to be where its source is: in a file that :mod:`linecache` holds.

    The source starts a line before the original's, so that there is room for ``line``.
    """
    code = original.__code__
    file = f"{code.co_filename} [{original.__qualname__}, line {code.co_firstlineno}: {line}]"
    first = max(code.co_firstlineno - 1, 1)
    linecache.cache[file] = (lambda: "\n" * (first - 1) + _twin_source(code, first, line),)
    return twin.replace(co_filename=file, co_firstlineno=first, co_name=original.__name__)


def _twin_source(original: types.CodeType, first: int, line: str) -> str:
    """Return the source of ``original``, from its ``def`` on, with its body in ``line``.

    Args:
        original: the code whose source is wanted.
        first: the number of the first line returned; each line of the body keeps its number.
        line: a ``with`` statement to put the body in, or a statement to put in its place.

    Raises:
        OSError: there is no source, or no ``def`` in it.
    """
    lines, number = inspect.getsourcelines(original)
    definition, colon, column, statements = _layout(lines)
    rest = lines[colon][column:]
    if not statements:
        lines[colon] = lines[colon][:column] + "\n"
    margin = _margin(lines[definition])
    for row in (definition, *statements):
        lines[row] = lines[row].removeprefix(margin)

    if statements:
        body = statements[0]
        indent = _margin(lines[body])
        for row in statements:
            lines[row] = f"{indent}    {lines[row].removeprefix(indent)}"
        above, row = lines[definition:body], body - 1
        inside = [f"{indent}{line}  # must be the outermost decorator\n", *lines[body:]]
    else:
        above, row = lines[definition : colon + 1], colon
        inside = [f"    {line}{rest}", *lines[colon + 1 :]]
    if not line.endswith(":"):
        inside = [f"    {line}\n"]
    blank = number + row - first - len(above)
    return "".join([*above, *["\n"] * blank, *inside])


def _layout(lines: list[str]) -> tuple[int, int, int, list[int]]:
    """Find the parts of a function definition, and return rows counted from 0.

    Returns:
        The row of ``def``; row and column where the ``:`` of the definition ends; and the rows at
        which statements of the body start, none of them if it is on the row of the ``:``. Other
        rows continue a statement or a string, and are no matter of indentation.

    Raises:
        OSError: there is no ``def`` in the lines.
    """
    definition, colon, column, depth = None, None, 0, 0
    statements = []
    at_start = True
    for kind, text, (row, _), (_, end), _ in tokenize.generate_tokens(iter(lines).__next__):
        if kind in _NO_STATEMENT:
            continue
        if definition is None:
            if at_start and text == "def":
                definition = row - 1
        elif colon is None:
            depth += (text in _OPENING) - (text in _CLOSING)
            if text == ":" and depth == 0:
                colon, column = row - 1, end
        elif at_start and kind != tokenize.NEWLINE:
            statements.append(row - 1)
        at_start = kind == tokenize.NEWLINE
    if definition is None or colon is None:
        raise OSError("no function definition in the source")
    return definition, colon, column, statements


_NO_STATEMENT = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
_OPENING = ("(", "[", "{")
_CLOSING = (")", "]", "}")


def _margin(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
