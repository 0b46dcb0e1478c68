"""``amp-script inspect``: tables, JSON, and a page that Chromium shows."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from torch import nn

import amp_script
from amp_script.artifact import read_program
from amp_script.cli.app import run
from amp_script.report import Cast, Operator, PrecisionReport, precision_report
from amp_script.report.page import page

HOSTILE = "</script><script>document['title']='owned'</script><img src=x onerror=alert(1)>"


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.add_module(HOSTILE, nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return getattr(self, HOSTILE)(self.norm(x) + x)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    torch.manual_seed(0)
    frozen = amp_script.trace_and_freeze(Network().eval(), torch.randn(2, 8), dtype=torch.bfloat16)
    amp_script.save(frozen, folder / "model.pt")
    torch.jit.script(nn.Linear(2, 2)).save(str(folder / "plain.pt"))
    (folder / "cut.pt").write_bytes((folder / "model.pt").read_bytes()[:5000])
    (folder / "text.pt").write_text("nothing")
    torch.save({"weight": torch.zeros(3)}, folder / "checkpoint.pt")
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> PrecisionReport:
    module, metadata = read_program(folder / "model.pt")
    return precision_report(module, metadata=metadata)


# --- what it prints -------------------------------------------------------------------------------


def test_it_shows_what_a_file_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder / "model.pt")]) == 0
    shown = capsys.readouterr()
    assert not shown.err
    assert re.search(r"^compute plan +native$", shown.out, re.M)
    assert re.search(r"^input x +float32 2x8$", shown.out, re.M)
    assert re.search(r"^operator +bfloat16", shown.out, re.M)
    assert re.search(r"^aten::linear +4", shown.out, re.M)
    assert re.search(r"^layers\.\*  \(each of 2\) +1", shown.out, re.M)
    assert re.search(r"^libtorch +\d\.\d+ or newer$", shown.out, re.M)
    assert "\x1b" not in shown.out


def test_json_is_the_report(
    folder: Path, report: PrecisionReport, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(folder / "model.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(report.to_json())


def test_a_file_of_anybody_s(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(folder / "plain.pt")]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^module +Linear, scripted$", shown, re.M)
    assert "compute plan" not in shown
    assert run(["inspect", str(folder / "plain.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["missing.pt"], 1, "missing.pt: no such file"),
        (["cut.pt"], 1, "cut.pt: no TorchScript archive, or cut short"),
        (["text.pt"], 1, "text.pt: no TorchScript archive"),
        (["checkpoint.pt"], 1, "checkpoint.pt: weights or a model that torch.save pickled"),
        (["."], 1, "a folder, not a file"),
        (["model.pt", "--html", "text.pt"], 2, "pass --force"),
        (["model.pt", "--html", "nowhere/x.html"], 2, "no folder nowhere"),
        (["model.pt", "--html", "./model.pt", "--force"], 2, "that is FILE itself"),
        (["missing.pt", "--html", "text.pt", "--force"], 1, "missing.pt: no such file"),
    ],
)
def test_one_clear_error(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert run(["inspect", *arguments]) == code
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_the_program_is_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the program ran")

    monkeypatch.setattr(torch.jit.ScriptModule, "__call__", refuse)
    monkeypatch.setattr(amp_script.frozen.Program, "run", refuse)
    assert run(["inspect", str(folder / "model.pt")]) == 0


def test_the_page_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.html"
    command = ["inspect", str(folder / "model.pt"), "--html", str(out)]
    assert run(command) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert run(command) == 2
    assert run([*command, "--force"]) == 0
    assert "<title>model.pt: precision</title>" in out.read_text(encoding="utf-8")


# --- the page -------------------------------------------------------------------------------------


def test_the_page_needs_no_network_and_runs_its_own_script_alone(report: PrecisionReport) -> None:
    text = page(report, title="model.pt")
    assert not re.search(r"https?:|@import|url\(|<link|<script src|<img", text)
    assert text.count("<script") == 2
    assert "default-src &#x27;none&#x27;" in text
    assert "unsafe-inline&#x27;; script-src &#x27;sha256-" in text


def _browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


needs_browser = pytest.mark.skipif(
    _browser() is None, reason="needs Chromium: apt-get install chromium"
)

Show = Callable[..., str]


@pytest.fixture
def show(tmp_path: Path) -> Show:
    """Show a page in Chromium and return its document after its script has run."""

    def shown(text: str, *, hash: str = "", dark: bool = False) -> str:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8")
        browser = _browser()
        assert browser is not None
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--dump-dom",
        ]
        command = [browser, *options, file.as_uri() + hash]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    return shown


def _rows(document: str) -> list[int]:
    return [int(number) for number in re.findall(r'<div class="op[^"]*" id="op-(\d+)"', document)]


def _found(document: str) -> str:
    (text,) = re.findall(r'<output id="found"[^>]*>([^<]*)</output>', document)
    return str(text)


@needs_browser
def test_the_search_filters_operators(report: PrecisionReport, show: Show) -> None:
    text = page(report, title="model.pt")
    everything = show(text)
    assert sorted(_rows(everything)) == list(range(len(report.operators)))
    assert _found(everything) == f"{len(report.operators)} operators"
    texts = [f"{o.kind} {o.dtype} {o.submodule} {o.source}".lower() for o in report.operators]
    activations = [cast.operator for cast in report.casts if cast.origin == "activation"]
    for query, wanted in {
        "layer_norm": [i for i, text in enumerate(texts) if "layer_norm" in text],
        "LAYERS.1 relu": [i for i, t in enumerate(texts) if "layers.1" in t and "relu" in t],
        "cast activation": activations,
        "no such thing": [],
    }.items():
        document = show(text, hash=f"#q={quote(query)}")
        assert sorted(_rows(document)) == wanted
        assert _found(document) == f"{len(wanted)} of {len(report.operators)} operators"
    assert "No operator is like that." in document
    assert _found(show(text, hash="#q=100%")) == f"0 of {len(report.operators)} operators"


TRANSPARENT = "rgba(0, 0, 0, 0)"

PROBE = """
<script>
const see = (element) => {
  const style = getComputedStyle(element);
  return [style.color, style.backgroundColor];
};
const seen = [see(document.body), ...[...document.querySelectorAll(".badge")].map(see)];
document.documentElement.dataset.seen = JSON.stringify(seen);
</script>
"""


@needs_browser
def test_both_colour_schemes_can_be_read(report: PrecisionReport, show: Show) -> None:
    text = page(_of_every_dtype(report), title="model.pt")
    probed = re.sub(r"<meta http-equiv=[^>]*>", "", text).replace("</body>", PROBE + "</body>")
    light, dark = (_seen(show(probed, dark=dark)) for dark in (False, True))
    assert _luminance(light[0][1]) > 0.8
    assert _luminance(dark[0][1]) < 0.05
    for pairs in (light, dark):
        assert len(pairs) > 8
        background = pairs[0][1]
        for color, own in pairs:
            assert _contrast(color, background if own == TRANSPARENT else own) >= 4.5


def _of_every_dtype(report: PrecisionReport) -> PrecisionReport:
    """A report with an operator in each kind of dtype."""
    dtypes = [
        torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float32, torch.float64,
        torch.int64, torch.bool, torch.complex64, None,
    ]  # fmt: skip
    example = dataclasses.replace(report.operators[0], inputs=())
    operators = tuple(dataclasses.replace(example, dtype=dtype) for dtype in dtypes)
    return dataclasses.replace(report, operators=operators, casts=())


def _seen(document: str) -> list[tuple[str, str]]:
    (text,) = re.findall(r'data-seen="([^"]*)"', document)
    return [(color, own) for color, own in json.loads(text.replace("&quot;", '"'))]


def _luminance(color: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    """As the accessibility guidelines define it: 4.5 is what text needs."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
def test_hostile_names_stay_text(report: PrecisionReport, show: Show) -> None:
    hostile = dataclasses.replace(
        report,
        name=HOSTILE,
        operators=tuple(
            dataclasses.replace(operator, kind=HOSTILE, source=f"{HOSTILE}:1: {HOSTILE}")
            for operator in report.operators
        ),
    )
    document = show(page(hostile, title=HOSTILE))
    assert document.count("<script") == 2
    assert "<img" not in document
    assert "<title>&lt;/script&gt;" in document
    assert _found(document) == f"{len(report.operators)} operators"


@needs_browser
def test_a_large_program(report: PrecisionReport, show: Show) -> None:
    operators = tuple(
        Operator(
            method="forward",
            name=f"v{index}",
            kind="aten::linear" if index % 3 else "aten::to",
            dtype=torch.bfloat16 if index % 7 else None,
            submodule=f"encoder.layer.{index // 40}.part{index % 40 // 10}",
            source=f"model.py:{index}: x = f(x)",
            inputs=(index - 1,) if index else (),
            operands=(torch.bfloat16,),
        )
        for index in range(6000)
    )
    casts = tuple(
        Cast(index, torch.float32, torch.bfloat16, "activation", ("aten::linear",), False)
        for index in range(0, 6000, 3)
    )
    text = page(dataclasses.replace(report, operators=operators, casts=casts), title="large.pt")
    assert len(_rows(show(text))) < 100  # those of closed submodules are not there yet
    chosen = show(text, hash="#op-5432")
    assert 5432 in _rows(chosen)
    assert re.search(r'class="op chosen" id="op-5432"', chosen)
    assert len(_rows(show(text, hash="#q=layer.77."))) == 40
