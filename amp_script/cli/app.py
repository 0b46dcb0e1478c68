"""From a command line to an exit code: 0 for success, 1 for a failure, 2 for a wrong command line,
and 130, as shells have it, after Ctrl-C.
"""

from __future__ import annotations

import importlib
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Final

import torch
import typer

import amp_script
from amp_script.cli import COMMANDS, output
from amp_script.errors import AmpScriptError, UsageError

__all__ = ["application", "run"]

FAILURE = 1
USAGE = 2
INTERRUPTED = 130

# typer raises click's errors, which are its own copy in newer releases.
_TyperUsageError = typer.BadParameter.__mro__[1]


def run(args: Sequence[str]) -> int:
    """Run a command line, given without the program's name, and return the exit code.

    Nothing is raised: an error becomes one line on standard error, after its traceback with
    ``--debug``, which may stand anywhere before ``--``.
    """
    args, debug = _take_debug(args)
    try:
        with _brief_warnings(all_of_them=debug):
            code = application()(args or ["--help"], prog_name="amp-script", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _report(error, hint="" if debug else f" ({_where(error)})")
    if code == INTERRUPTED:
        output.error("interrupted")
    return code if isinstance(code, int) else 0


def _report(error: Exception, *, hint: str) -> int:
    if isinstance(error, (UsageError, _TyperUsageError)):
        output.error(_one_line(error))
        return USAGE
    if isinstance(error, AmpScriptError):
        output.error(_one_line(error))
    else:
        output.error(f"{type(error).__name__}: {_one_line(error)}{hint}")
    return FAILURE


def _where(error: Exception) -> str:
    """The innermost line that is neither torch's nor this library's, such as a model's own."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_COMMAND):
            break
        if not frame.filename.startswith(_NOT_THE_MODELS):
            return f"at {frame.filename}:{frame.lineno}; --debug shows more"
    return "--debug shows where"


_COMMAND: Final = os.path.dirname(__file__) + os.sep
_NOT_THE_MODELS: Final = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(amp_script.__file__) + os.sep,
    "<",
)


def application() -> typer.Typer:
    """Return the command with all its subcommands, as typer has it."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.callback()(_options)
    for name in COMMANDS:
        module = importlib.import_module(f"amp_script.cli.{name.replace('-', '_')}")
        app.command(name)(module.command)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        output.line(f"amp-script {version('amp-script')}, torch {version('torch')}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print versions and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Eager autocast, bit for bit, for TorchScript."""


def _take_debug(args: Sequence[str]) -> tuple[list[str], bool]:
    options = list(args)
    rest = options.index("--") if "--" in options else len(options)
    kept = [option for option in options[:rest] if option != "--debug"]
    return kept + options[rest:], len(kept) < rest


@contextmanager
def _brief_warnings(*, all_of_them: bool) -> Iterator[None]:
    """Show each warning as one line, without the source line that raised it.

    What will change in a future release of a package concerns its callers, not this command's.
    """
    with warnings.catch_warnings():
        if not all_of_them:
            warnings.simplefilter("ignore", FutureWarning, append=True)
        warnings.showwarning = lambda message, *_, **__: output.warning(_one_line(message))
        yield


def _one_line(error: Exception | str) -> str:
    return output.one_line(str(getattr(error, "format_message", error.__str__)()))
