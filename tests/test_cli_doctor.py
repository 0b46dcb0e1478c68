"""``amp-script doctor``, and its comparison of this torch's autocast with the record."""

from __future__ import annotations

import pytest

from amp_script.cli import app
from amp_script.policy import tables


def test_what_the_processor_offers(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "processor" in shown
    assert "bfloat16" in shown
    assert "autocast on" not in shown


def test_policies_as_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "--policies", "--device", "cpu", "--device", "mps"]) == 0
    shown = capfd.readouterr()
    assert "autocast on cpu" in shown.out
    assert "autocast on mps" in shown.out
    assert shown.out.count("operators, all as recorded") == 2
    assert not shown.err


def test_a_policy_that_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    table = {name: rule for name, rule in tables.CPU.items() if name != "mm"}
    monkeypatch.setattr("amp_script.policy.registry.TABLES", {"cpu": table})
    assert app.run(["doctor", "--policies", "--device", "cpu"]) == 1
    shown = capfd.readouterr()
    assert "operators, 1 not as recorded" in shown.out
    assert "cpu: aten::mm: no rule on record, LOWER seen" in shown.out
    assert shown.err.startswith("error: this torch autocasts 1 operators in ways that")


def test_operators_of_a_library(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--policies", "--device", "cpu", "--import"]
    assert app.run([*arguments, "torch.nn.functional"]) == 0
    assert app.run([*arguments, "no_such_library"]) == 2
    assert "--import no_such_library: No module named" in capfd.readouterr().err


def test_a_device_without_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "--policies", "--device", "gpu"]) == 2
    message = capsys.readouterr().err
    assert "--device gpu: no device type with autocast in this torch, which has cpu" in message


def test_what_would_be_ignored_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["doctor", "--device", "cpu", "--import", "torchvision"]) == 2
    shown = capsys.readouterr()
    assert shown.err == "error: --device and --import: expected together with --policies\n"
    assert not shown.out
