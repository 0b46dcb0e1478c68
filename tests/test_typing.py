"""Runs the files in ``typing/`` through mypy and pyright: each error announced comes, and no other.

pytest runs the same files too, so that what is typed is also what happens.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkers import Report, mypy, pyright, unexpected

from amp_script import torch_stubs

FOLDER = Path(__file__).parent / "typing"
OURS = sorted(FOLDER.glob("ours/*.py"))
TORCH_STUBS = sorted(FOLDER.glob("torch_stubs/*.py"))


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_our_types_need_no_stubs(checker: Callable[..., list[Report]]) -> None:
    assert unexpected(checker, OURS) == []


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_our_types_and_torchs_with_stubs(
    checker: Callable[..., list[Report]], tmp_path: Path
) -> None:
    search_path = torch_stubs.write_search_path(tmp_path / "stubs")
    assert unexpected(checker, OURS + TORCH_STUBS, search_path=search_path) == []


def test_an_error_that_does_not_come_is_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "quiet.py"
    file.write_text('1 + 1  # E: mypy[operator]\n1 + ""\n')
    first, second = unexpected(mypy, [file])
    assert first.startswith("quiet.py:2: unexpected operator")
    assert second == "quiet.py:1: no operator"
