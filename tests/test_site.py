"""The site: it builds without a warning or the network, and shows what is in the code."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

import amp_script
from amp_script import errors
from amp_script.cli import COMMANDS
from amp_script.lowering.composites import decompositions
from amp_script.policy.tables import PRIVATE, TABLES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A proxy that is not there fails whatever would be fetched."""
    folder = tmp_path_factory.mktemp("site")
    nowhere = "http://127.0.0.1:9"
    offline = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), nowhere)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, **offline, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def _text(site: Path, page: str) -> str:
    """A page's text, without its tags."""
    source = (site / page / "index.html").read_text()
    return html.unescape(re.sub(r"<[^>]*>", "", source))


class _Parsed(HTMLParser):
    """What a page loads when it is shown, where it leads, and the places in it."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.places.add(values.get("id") or "")
        if tag == "a":
            self.links.append(values.get("href") or "")
        elif tag != "link" or values.get("rel") not in ("next", "prev", "canonical"):
            loaded = values.get("href") if tag == "link" else values.get("src")
            if loaded and not loaded.startswith("data:"):
                self.loads.append(loaded)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, _Parsed]:
    """Every page but the one for addresses that are not there, which has no address itself."""
    files = [file for file in site.rglob("*.html") if file.name != "404.html"]
    return {file: _Parsed(file) for file in files}


def test_pages_fetch_nothing_from_elsewhere(site: Path, pages: dict[Path, _Parsed]) -> None:
    for file, page in pages.items():
        assert not [address for address in page.loads if urlsplit(address).netloc], file
    for sheet in site.rglob("*.css"):
        assert "@import" not in sheet.read_text(), sheet


def test_links_lead_somewhere(pages: dict[Path, _Parsed]) -> None:
    for file, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.netloc:
                continue
            target = (file.parent / address.path).resolve() if address.path else file
            target = target / "index.html" if target.is_dir() else target
            assert target in pages, f"{file}: {link}"
            assert unquote(address.fragment) in pages[target].places | {"", "__skip"}, (
                f"{file}: {link}"
            )


def test_every_page_of_the_documentation_is_in_the_navigation(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        address = re.sub(r"(^|/)index$", r"\1", path).rstrip("/")
        assert f'href="{address + "/" if address else "."}"' in start, path


def test_the_policy_table_has_every_operator_on_every_device(site: Path) -> None:
    source = (site / "rules" / "policies" / "index.html").read_text()
    table = source[source.index('<div class="policies">') :].partition("</table>")[0]
    rows = dict(re.findall(r"<tr><td><code>(.+?)</code></td>(.*?)</tr>", table))
    tables = [*TABLES.values(), PRIVATE]
    assert rows.keys() == set().union(*tables)
    shared = {id(rules): rules for rules in tables}
    for operator, cells in rows.items():
        filled = [rules for rules in shared.values() if operator in rules]
        assert cells.count("<td") == len(shared)
        assert cells.count("<span") == len(filled), operator
    for device_type in TABLES:
        assert re.search(rf"<th>[^<]*\b{device_type}\b", table)


def test_the_composites_are_all_there(site: Path) -> None:
    shown = _text(site, "rules/composites")
    for each in decompositions():
        assert each.operator.removeprefix("aten::") in shown


def test_every_example_is_listed(site: Path) -> None:
    shown = _text(site, "guides")
    for path in (ROOT / "examples").iterdir():
        if path.name != "__pycache__":
            assert f"examples/{path.name}" in shown


def test_the_reference_has_every_public_name(site: Path) -> None:
    source = (site / "reference" / "python" / "index.html").read_text()
    for name in amp_script.__all__:
        assert f'id="amp_script.{name}"' in source
    source = (site / "reference" / "errors" / "index.html").read_text()
    for name, value in vars(errors).items():
        if isinstance(value, type) and value.__module__ == errors.__name__:
            assert f'id="amp_script.errors.{name}"' in source


def test_the_reference_has_every_command(site: Path) -> None:
    shown = _text(site, "reference/command")
    for name in COMMANDS:
        assert f"amp-script {name}" in shown


def test_docstrings_are_shown_without_the_notation_of_another_tool(site: Path) -> None:
    for page in (site / "reference").rglob("index.html"):
        assert not re.search(r":(attr|class|data|exc|func|meth|mod):", page.read_text()), page


def test_the_site_says_which_torch_it_was_built_with(site: Path) -> None:
    assert torch.__version__ in _text(site, "rules/casts")
