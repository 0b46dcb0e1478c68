"""The rows of device types; how they compare with torch is in test_autocast_differential.py."""

from __future__ import annotations

import warnings

import pytest
import torch

from amp_script import devices


def test_every_row_has_autocast_or_this_torch_lacks_it() -> None:
    lacking = set(devices.ROWS) - set(devices.with_autocast())
    assert lacking == {name for name in devices.ROWS if not devices.is_autocast_available(name)}
    assert devices.with_autocast()[-1] == torch._C._get_privateuse1_backend_name()


def test_what_is_settled_is_what_no_question_can_change() -> None:
    assert "cpu" in devices.SETTLED
    assert "cuda" not in devices.SETTLED
    assert torch._C._get_privateuse1_backend_name() not in devices.SETTLED
    for name, dtypes in devices.SETTLED.items():
        devices.admit(name)
        for dtype in dtypes:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert devices.permits(name, dtype, True, stacklevel=1)


@pytest.mark.parametrize("device_type", ["cpu", "xpu", "mtia"])
def test_an_unsupported_dtype_is_warned_of_with_the_supported_ones(device_type: str) -> None:
    with pytest.warns(UserWarning, match=rf"In {device_type.upper()} autocast") as caught:
        assert not devices.permits(device_type, torch.float32, True, stacklevel=1)
    message = str(caught[0].message)
    assert "torch.bfloat16" in message
    assert "torch.float16" in message
    assert caught[0].filename == __file__


def test_a_disabled_region_may_have_any_dtype() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for device_type in devices.ROWS:
            assert devices.permits(device_type, torch.int8, False, stacklevel=1) is False


@pytest.mark.parametrize("enabled", [1, None, "yes"])
def test_enabled_is_a_bool(enabled: object) -> None:
    with pytest.raises(TypeError, match=f"{enabled!r}"):
        devices.permits("cpu", torch.float16, enabled, stacklevel=1)  # type: ignore[arg-type]  # the case


def test_a_private_backend_that_registered_nothing_is_told_what_it_lacks() -> None:
    backend = torch._C._get_privateuse1_backend_name()
    with pytest.raises(AssertionError, match=f"no module is registered as `torch.{backend}`"):
        devices.admit(backend)


@pytest.mark.parametrize("macos_14", [True, False])
def test_the_question_that_older_torch_asks_of_macos(
    macos_14: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *version: macos_14)
    row = devices.Row(objection=devices._mps_objection)
    monkeypatch.setitem(devices.ROWS, "mps", row)
    assert devices.permits("mps", torch.float16, True, stacklevel=1)
    if macos_14:
        assert devices.permits("mps", torch.bfloat16, True, stacklevel=1)
        return
    with pytest.warns(UserWarning, match=r"torch\.bfloat16 is not supported on macOS versions"):
        assert not devices.permits("mps", torch.bfloat16, True, stacklevel=1)


def test_mps_is_asked_about_macos_only_as_the_installed_torch_asks() -> None:
    asked = devices.ROWS["mps"].objection is not None
    assert asked is (torch.__version__ < "2.10")
