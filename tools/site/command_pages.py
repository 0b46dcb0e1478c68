"""The command's reference, read from the commands themselves."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

import typer.main
from markdown_text import cell, code, listed, table

from amp_script.cli import COMMANDS, app
from amp_script.cli.specs import DTYPES

__all__ = ["commands", "input_spec_dtypes"]

_CODE_OR_OPTION: Final = re.compile(r"`[^`]*`|--[a-z][\w-]*")


def commands() -> str:
    """A section for each command: what it does, how it is called, what it takes."""
    group: Any = typer.main.get_command(app.application())
    return "\n".join(_section(name, group.commands[name]) for name in COMMANDS)


def input_spec_dtypes() -> str:
    """The dtypes that an input spec may name."""
    return listed(DTYPES)


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    usage = " ".join(
        ["amp-script", name, *map(_metavar, arguments), "[OPTIONS]" if options else ""]
    )
    parts = [
        f"## {name}",
        _marked(inspect.cleandoc(command.help)),
        f"```text\n{usage.rstrip()}\n```",
    ]
    if arguments:
        rows = [(f"`{_metavar(each)}`", _help(each)) for each in arguments]
        parts.append(table(["argument", "meaning"], rows))
    if options:
        rows = [(_option(each), _help(each)) for each in options]
        parts.append(table(["option", "meaning"], rows))
    return "\n\n".join(parts) + "\n"


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    return names if option.is_flag else f"{names} `{option.metavar or option.type.name.upper()}`"


def _help(parameter: Any) -> str:
    text = cell(_marked(parameter.help or ""))
    if parameter.required:
        return f"{text} **Required.**"
    default = parameter.default
    if default in (None, False, (), []) or callable(default):
        return text
    return f"{text} Default: `{getattr(default, 'value', default)}`."


def _marked(text: str) -> str:
    """Help as Markdown, in which options are code."""
    return _CODE_OR_OPTION.sub(lambda found: code(found[0].strip("`")), text)
