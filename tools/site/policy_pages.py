"""The policies, the composites and the processors that the site shows, read from the package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

import torch
from markdown_text import cell, listed, table

from amp_script import devices
from amp_script.compute import Kind, processor
from amp_script.dtypes import dtype_name
from amp_script.lowering.composites import decompositions
from amp_script.policy import Policy, Rule, autocast_device_types
from amp_script.policy.tables import ELIGIBLE_DEVICE_TYPES, PRIVATE, TABLES, Table

_SHOWN: Final[Mapping[Policy, tuple[str, str]]] = {
    Policy.LOWER: ("lower", "lower"),
    Policy.FLOAT32: ("float32", "float32"),
    Policy.FLOAT32_OPTIONAL_DTYPE: ("dtype", "dtype argument"),
    Policy.FLOAT32_APPENDED_DTYPE: ("dtype", "dtype overload"),
    Policy.PROMOTE: ("promote", "promote"),
    Policy.REFUSED: ("refused", "refused"),
    Policy.CAST_INPUTS: ("fixed", ""),
}
"""For each kind its class in the style sheet, and what stands in the table."""


def policy_table() -> str:
    """One table of every operator and what it does on every device that has a table."""
    columns = _families()
    operators = sorted(set().union(*columns.values()))
    head = "".join(f"<th>{name}</th>" for name in columns)
    rows = [
        f"<tr><td><code>{operator}</code></td>"
        + "".join(_mark(rules.get(operator)) for rules in columns.values())
        + "</tr>"
        for operator in operators
    ]
    return "\n".join(
        [
            '<div class="policies">',
            '<input type="search" class="policies-filter" aria-label="Filter operators" '
            f'placeholder="Filter {len(operators)} operators by name or policy">',
            f"<table><thead><tr><th>operator</th>{head}</tr></thead><tbody>",
            *rows,
            "</tbody></table>",
            '<p class="policies-none" hidden>No operator matches.</p>',
            "</div>",
        ]
    )


def policies_by_device() -> str:
    """For each device a tab, and in it for each kind the operators."""
    parts = []
    for name, rules in _families().items():
        by_kind: defaultdict[Policy, list[str]] = defaultdict(list)
        for operator, rule in sorted(rules.items()):
            by_kind[rule.policy].append(operator)
        parts.append(f'=== "{name}"\n')
        for policy in Policy:
            if by_kind[policy]:
                title = f"{policy.value} ({len(by_kind[policy])})"
                parts.append(f"    **{title}**\n\n    {listed(by_kind[policy])}\n")
    return "\n".join(parts)


def eligible_device_types() -> str:
    """Which tensors a region casts, for the devices where it is not their own alone."""
    rows = [(f"`{name}`", listed(where)) for name, where in ELIGIBLE_DEVICE_TYPES.items()]
    return table(["region on", "casts tensors on"], [*rows, ("any other", "the same")])


def region_dtypes() -> str:
    """The dtypes that a region may name, and the one it has if it names none, by device type."""
    available = set(autocast_device_types())
    rows = []
    for name, row in devices.ROWS.items():
        dtypes = "any" if row.dtypes is None else listed(map(dtype_name, row.dtypes))
        default = dtype_name(torch.get_autocast_dtype(name)) if name in available else ""
        rows.append((f"`{name}`", dtypes, f"`{default}`" if default else "no autocast"))
    return table(["device type", "dtypes", f"default in torch {torch.__version__}"], rows)


def composites() -> str:
    """The operators that are taken apart, by the subject that they are filed under."""
    subjects: defaultdict[str, list[str]] = defaultdict(list)
    for each in decompositions():
        module = getattr(each.function, "__module__", "")
        subjects[module.rpartition(".")[2]].append(each.operator.removeprefix("aten::"))
    return table(
        ["file", "operators"],
        [(f"`{subject}.py`", listed(names)) for subject, names in sorted(subjects.items())],
    )


def native_kernels() -> str:
    """Which instructions give which kinds of operator a kernel in which dtype."""
    rows = []
    for dtype, needed in processor.NATIVE.items():
        for instructions, kinds in needed.items():
            shown = [kind.value for kind in Kind if kind in kinds]
            rows.append((f"`{dtype_name(dtype)}`", instructions, cell(", ".join(shown))))
    return table(["dtype", "instructions", "native kernels for"], rows)


def _families() -> dict[str, Table]:
    """The tables by the names of the devices that share each."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    tables = {**TABLES, "private backends": PRIVATE}
    for name, rules in tables.items():
        names[id(rules)].append(name)
    return {", ".join(shared): tables[shared[0]] for shared in names.values()}


def _mark(rule: Rule | None) -> str:
    if rule is None:
        return '<td class="policy-none"></td>'
    kind, text = _SHOWN[rule.policy]
    text = text or dtype_name(rule.dtype)
    return f'<td><span class="policy policy-{kind}">{text}</span></td>'
