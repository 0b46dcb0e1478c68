"""``amp-script inspect``: what a TorchScript file holds, and what works in which dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from amp_script import artifact
from amp_script.cli import output
from amp_script.cli.files import require_free
from amp_script.cli.options import AsJson
from amp_script.errors import UsageError
from amp_script.report import PrecisionReport, precision_report


def command(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A `.pt` file, from amp-script or anybody else.")
    ],
    as_json: AsJson = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.html",
            help="Write the report, with every operator, as one page that needs no network.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT.html if it exists.")] = False,
) -> None:
    """Show which operator of a file works in which dtype, what casts are left, and what it needs.

    The program is read, and not run. Where it does not tell a dtype, the dtype is *unknown*.

    Example: `amp-script inspect encoder.pt --html encoder.html`
    """
    if html is not None:
        require_free(html, force)
        if html.exists() and file.exists() and html.samefile(file):
            raise UsageError(f"--html {html}: that is FILE itself; pass another name")
    with output.step(f"reading {file}"):
        module, metadata = artifact.read_program(file)
        report = precision_report(module, metadata=metadata)
    if html is not None:
        from amp_script.report.page import page

        html.write_text(page(report, title=file.name), encoding="utf-8")
    if as_json:
        output.line(report.to_json())
    elif html is not None:
        output.line(str(html))
    else:
        _show(report)


def _show(report: PrecisionReport) -> None:
    for table in report.tables():
        if table.title:
            output.line(f"\n{table.title}")
            output.grid(table)
        else:
            output.table((name, value) for name, value in table.rows)
