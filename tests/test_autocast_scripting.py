"""autocast under plain torch.jit.script, each program in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import scripting_cases


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str | None]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(scripting_cases.__file__))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outcomes: dict[str, str | None] = json.loads(result.stdout)
    return outcomes


@pytest.mark.parametrize("case", scripting_cases.cases())
def test_case(case: str, outcomes: dict[str, str | None]) -> None:
    assert outcomes[case] is None, outcomes[case]
