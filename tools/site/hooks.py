"""What MkDocs asks of the project: the parts of pages that are written from the code.

A line ``<!-- generated: NAME -->`` in a page becomes the Markdown that the function of that name in
:data:`GENERATED` returns, at every build, so that no page can say something else than the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import command_pages
import example_pages
import policy_pages
import python_pages
from mkdocs.exceptions import PluginError

import amp_script.accuracy
import amp_script.report

GENERATED: Final[Mapping[str, Callable[[], str]]] = {
    "command": command_pages.commands,
    "composites": policy_pages.composites,
    "eligible device types": policy_pages.eligible_device_types,
    "errors": python_pages.errors,
    "examples": example_pages.examples,
    "input spec dtypes": command_pages.input_spec_dtypes,
    "names of amp_script.accuracy": partial(python_pages.names_of, amp_script.accuracy),
    "names of amp_script.report": partial(python_pages.names_of, amp_script.report),
    "native kernels": policy_pages.native_kernels,
    "policies by device": policy_pages.policies_by_device,
    "policy table": policy_pages.policy_table,
    "public names": python_pages.public_names,
    "region dtypes": policy_pages.region_dtypes,
}

_MARKER: Final = re.compile(r"^<!-- generated: (.+?) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: object) -> str:
    """Put the generated parts into a page."""

    def generated(match: re.Match[str]) -> str:
        if match[1] not in GENERATED:
            raise PluginError(
                f"{page.file.src_uri}: nothing generates {match[1]!r}, but {', '.join(GENERATED)}"
            )
        return GENERATED[match[1]]()

    return _MARKER.sub(generated, markdown)
