"""Every code block of the README and the documentation runs, and what they say exists."""

import re
from pathlib import Path

import pytest
from documents import PAGES, ROOT, Page, blocks_of
from versions import loads_exported_programs

from amp_script.cli import COMMANDS

BLOCKS = [block for page in PAGES for block in blocks_of(page)]

NOT_RUN = {
    "it checks a package of yours": 2,
    "it installs into the environment": 3,
    "it needs a C++ compiler, and a test of its own builds and runs it": 2,
}
"""Every reason that a block may have not to run, and how many blocks have it."""


def _pages() -> list[object]:
    return [
        pytest.param(page, id=page.relative_to(ROOT).with_suffix("").as_posix())
        for page in PAGES
        if blocks_of(page)
    ]


@pytest.mark.parametrize("page", _pages())
@loads_exported_programs
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    running = Page()
    with running.running():
        for block in blocks_of(page):
            running.run(block)


def test_blocks_that_do_not_run_are_those_that_cannot() -> None:
    reasons = [block.reason for block in BLOCKS if block.reason]
    assert {reason: reasons.count(reason) for reason in reasons} == NOT_RUN


def test_the_readme_shows_freezing_scripting_and_training() -> None:
    titles = re.findall(r"^## (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"Freeze a model", "Script a module", "Train"} <= set(titles)


def test_only_commands_that_exist_are_shown() -> None:
    shown = (re.findall(r"\bamp-script ([a-z][\w-]*)", block.code) for block in BLOCKS)
    assert set().union(*shown) <= set(COMMANDS)


def test_the_map_of_the_code_names_every_module() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "amp_script").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            assert f"`{path.name}`" in contributing
        elif (path / "__init__.py").exists():
            assert f"`{path.name}/`" in contributing
