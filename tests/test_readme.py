"""The README's Python runs, its commands exist, and the map of the code is complete."""

import re
import runpy
from pathlib import Path

import pytest

from amp_script.cli import COMMANDS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^## (.+?)$|^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def _examples() -> list[object]:
    examples: list[object] = []
    heading = ""
    for title, code in BLOCKS:
        heading = title or heading
        if code:
            examples.append(pytest.param(code, id=heading.replace(" ", "-").lower()))
    return examples


@pytest.mark.parametrize("code", _examples())
def test_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "example.py"  # TorchScript reads the source from a file
    script.write_text(code)
    runpy.run_path(str(script))


def test_shows_freezing_scripting_and_training() -> None:
    titles = [title for title, _ in BLOCKS if title]
    assert {"Freeze a model", "Script a module", "Train"} <= set(titles)


def test_names_commands_that_exist() -> None:
    assert set(re.findall(r"^amp-script (\w+)", README, re.MULTILINE)) <= set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_the_map_of_the_code_names_every_module() -> None:
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for path in (ROOT / "amp_script").iterdir():
        if path.suffix == ".py" and path.name != "__init__.py":
            assert f"`{path.name}`" in contributing
        elif (path / "__init__.py").exists():
            assert f"`{path.name}/`" in contributing
