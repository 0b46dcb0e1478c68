"""TARGETs: Python objects named on the command line, ``package.module:attribute`` or
``path/file.py:attribute``.

Importing one runs the user's code, as ``python`` would: from the current folder for a module, from
its own folder for a file. ``sys.path`` keeps that folder, because a model may import more when it
is called; the process is the command's own.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch

from amp_script.errors import AmpScriptError, UsageError

__all__ = ["ExampleInputs", "load_inputs", "load_model"]

ExampleInputs: TypeAlias = "torch.Tensor | tuple[object, ...] | list[object] | Mapping[str, object]"

FORMS = "package.module:attribute or path/file.py:attribute"


def load_model(text: str) -> torch.nn.Module:
    """Return the module that ``text`` names, calling it first where it is a function.

    Raises:
        UsageError: ``text`` has another form, names nothing, or names something else.
        AmpScriptError: the user's code failed; the cause is its exception.
    """
    named = _load(text)
    value = _called(text, named)
    if not isinstance(value, torch.nn.Module):
        raise UsageError(
            f"{text} {_what(value, named)}: expected an nn.Module, or a function that returns one"
        )
    return value


def load_inputs(text: str) -> ExampleInputs:
    """Return the example inputs that ``text`` names, calling it first where it is a function.

    Raises:
        UsageError: ``text`` has another form, names nothing, or names something else.
        AmpScriptError: the user's code failed; the cause is its exception.
    """
    named = _load(text)
    value = _called(text, named)
    if not isinstance(value, (torch.Tensor, tuple, list, Mapping)):
        raise UsageError(
            f"{text} {_what(value, named)}: expected a tensor, a tuple of inputs or a dictionary "
            "by parameter name, or a function that returns one"
        )
    return value


def _load(text: str) -> object:
    location, colon, attribute = text.rpartition(":")
    if not colon or not location or not attribute:
        raise UsageError(f"{text!r} names no attribute of a module: expected {FORMS}")
    value: object = _file(location) if location.endswith(".py") else _module(location, text)
    for name in attribute.split("."):
        if not hasattr(value, name):
            raise UsageError(f"{location} has no attribute {attribute!r}{_close(value, name)}")
        value = getattr(value, name)
    return value


def _module(name: str, text: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UsageError(f"{text!r}: {name!r} is neither a module nor a .py file: expected {FORMS}")
    _import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UsageError(
                f"no module {error.name!r} in the current folder or among the installed packages"
            ) from error
        raise _failed(f"importing {name}", error) from error
    except (Exception, SystemExit) as error:
        raise _failed(f"importing {name}", error) from error


def _file(path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"no file {path}")
    _import_from(file.parent)
    # TorchScript finds sources and annotations through sys.modules. A name that is taken, say by a
    # file called test.py, must not hide what is there.
    name = file.stem
    for name in (file.stem, f"amp_script_target_{file.stem}"):
        loaded = sys.modules.get(name)
        if loaded is None:
            break
        if getattr(loaded, "__file__", None) == str(file):
            return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failed(f"running {path}", error) from error
    return module


def _import_from(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _called(text: str, value: object) -> object:
    if isinstance(value, (torch.nn.Module, torch.Tensor)) or not callable(value):
        return value
    try:
        signature = inspect.signature(value)
    except ValueError:
        signature = inspect.Signature()
    needed = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"{text} needs arguments ({', '.join(needed)}): name a function that takes none"
        )
    try:
        return value()
    except Exception as error:
        raise _failed(f"calling {text}", error) from error


def _failed(doing: str, error: BaseException) -> AmpScriptError:
    return AmpScriptError(f"{doing} failed: {type(error).__name__}: {error}")


def _what(value: object, named: object) -> str:
    """What a value is, or that calling what was named returned it."""
    verb = "is" if value is named else "returned"
    if value is None:
        return f"{verb} None"
    if isinstance(value, type):
        return f"{verb} the class {value.__name__}"
    return f"{verb} an object of type {type(value).__name__}"


def _close(value: object, name: str) -> str:
    close = difflib.get_close_matches(name, [known for known in dir(value) if known[0] != "_"])
    return f"; did you mean {' or '.join(close)}?" if close else ""
