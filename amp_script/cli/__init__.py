"""The command ``amp-script``.

To add a command: write ``cli/NAME.py``, with underscores for the name's hyphens, with a function
``command`` whose docstring is its help and whose parameters are its arguments, in typer's notation,
and put NAME into :data:`COMMANDS`. Errors are raised, not printed:
:class:`~amp_script.errors.UsageError` for a wrong command line, any other exception for a failure.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["COMMANDS", "main"]

COMMANDS: Final = (
    "freeze",
    "lower",
    "verify",
    "compare",
    "inspect",
    "bench",
    "export-triton",
    "doctor",
    "stubgen",
    "stubs",
)
"""Names of the commands, in the order in which the help lists them."""


def main() -> None:
    """Run the command that ``sys.argv`` names, and exit with its code."""
    try:
        # typer and rich are no dependencies of the library.
        from amp_script.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(
            f"amp-script: the command needs {error.name}, which is not installed: "
            "pip install 'amp-script[cli]'"
        )
    sys.exit(run(sys.argv[1:]))
