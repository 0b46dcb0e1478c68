"""A report as one HTML page: no network, no other files, and nothing that a program named runs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template

from amp_script.dtypes import dtype_name
from amp_script.tables import Table, size

from .model import PrecisionReport

__all__ = ["page"]


def page(report: PrecisionReport, *, title: str) -> str:
    """Write a report as a page with every operator, searchable, by submodule.

    Its content security policy lets the page's own script run and nothing else, and names from the
    program are text wherever they appear.

    Args:
        report: the report.
        title: what the page is about, such as the name of the file.
    """
    script = _part("page.js")
    return Template(_part("page.html")).substitute(
        policy=escape(_policy(script)),
        title=escape(title),
        subtitle=escape(_subtitle(report)),
        cards="\n".join(_card(*card) for card in _cards(report)),
        tables="\n".join(map(_table, report.tables())),
        report=_data(report),
        script=script,
    )


def _part(name: str) -> str:
    return (files("amp_script.report") / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _data(report: PrecisionReport) -> str:
    """The report as JSON that cannot end the element that it is in."""
    return json.dumps(report.to_dict(), separators=(",", ":")).replace("<", "\\u003c")


def _subtitle(report: PrecisionReport) -> str:
    plan = f", compute plan {report.compute}" if report.compute is not None else ""
    return f"{report.name}, {report.kind}{plan}"


def _cards(report: PrecisionReport) -> Iterable[tuple[str, str, str]]:
    dtypes = ", ".join(f"{count} {dtype_name(dtype)}" for dtype, count in report.by_dtype.items())
    yield "operators", str(len(report.operators)), dtypes
    origins = {cast.origin: 0 for cast in report.casts}
    for cast in report.casts:
        origins[cast.origin] += 1
    shown = ", ".join(f"{count} of {_PLURALS[origin]}" for origin, count in origins.items())
    yield "casts left", str(len(report.casts)), shown
    weights = ", ".join(
        f"{size(held.size)} {dtype_name(dtype)}" for dtype, held in report.weights.items()
    )
    yield "weights", size(sum(held.size for held in report.weights.values())), weights
    oldest = report.needs.oldest_libtorch
    lite = {True: "and the lite interpreter", False: "not the lite interpreter", None: ""}
    runs_on = "not known" if oldest is None else f"libtorch {oldest}+"
    yield "runs on", runs_on, lite[report.needs.lite_interpreter]


_PLURALS = {
    "activation": "activations",
    "constant": "constants",
    "input": "inputs",
    "weight": "weights",
}


def _card(name: str, value: str, more: str) -> str:
    small = f"<small>{escape(more)}</small>" if more else ""
    return f'<div class="card"><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>'


def _table(table: Table) -> str:
    first_number = len(table.headings) - table.numbers
    head = _row("th", table.headings, first_number) if any(table.headings) else ""
    body = "\n".join(_row("td", row, first_number) for row in table.rows)
    return (
        f"<h2>{escape(table.title or 'The file')}</h2>\n"
        f'<div class="scroll"><table>{head}\n{body}</table></div>'
    )


def _row(tag: str, cells: Iterable[str], first_number: int) -> str:
    written = (
        f"<{tag}{' class=number' * (index >= first_number)}>{escape(cell)}</{tag}>"
        for index, cell in enumerate(cells)
    )
    return f"<tr>{''.join(written)}</tr>"
