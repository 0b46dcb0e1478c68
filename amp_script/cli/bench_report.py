"""What ``amp-script bench`` measured, as a table, as JSON and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from amp_script import compute
from amp_script.accuracy import Difference
from amp_script.cli import output
from amp_script.cli.contestants import CONTESTANTS, THIS_FILE, Setting
from amp_script.dtypes import dtype_name
from amp_script.metadata import plain
from amp_script.tables import Table
from amp_script.timing import Times

__all__ = ["Bench", "draw", "show"]


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        setting: what was run.
        names: the ways, in order.
        times: of those that ran.
        errors: of those that failed, in one line.
        distances: of results to those of the model in float32; without those that cannot be
            compared, and empty without the model.
    """

    setting: Setting
    names: Sequence[str]
    times: Mapping[str, Times]
    errors: Mapping[str, str]
    distances: Mapping[str, Difference]

    def ratio(self, name: str) -> float | None:
        """The median as a multiple of this file's."""
        if THIS_FILE not in self.times or name not in self.times:
            return None
        return self.times[name].median / self.times[THIS_FILE].median


def show(bench: Bench, *, as_json: bool) -> None:
    """Print a table with what it is about, or JSON."""
    if as_json:
        output.line(json.dumps(_as_json(bench), indent=1, allow_nan=False))
        return
    headings = ("milliseconds", "median", "middle half", "times this file", "from float32")
    output.grid(Table("", headings, [_row(bench, name) for name in bench.names], numbers=4))
    output.line("")
    output.table(_about(bench))


def _row(bench: Bench, name: str) -> tuple[str, str, str, str, str]:
    if name in bench.errors:
        return name, "failed", "", "", ""
    times, ratio, distance = bench.times[name], bench.ratio(name), bench.distances.get(name)
    low, high = times.middle
    return (
        name,
        _milliseconds(times.median),
        f"{_milliseconds(low)} to {_milliseconds(high)}",
        "" if ratio is None else f"{ratio:.2f}",
        "" if distance is None else str(distance),
    )


def _milliseconds(seconds: float) -> str:
    """Three digits, and all of those before the point."""
    return f"{1000 * seconds:#.3g}" if seconds < 0.0995 else f"{1000 * seconds:.0f}"


def _about(bench: Bench) -> Iterator[tuple[str, str]]:
    for name, error in bench.errors.items():
        yield f"{name} failed", error
    for name in bench.names:
        yield name, CONTESTANTS[name].about
    setting = bench.setting
    yield "region", f"{dtype_name(setting.region.dtype)} on {setting.device}"
    for path, tensor in setting.of_model.named_tensors():
        sizes = "x".join(map(str, tensor.shape)) or "scalar"
        yield f"input {path}", f"{dtype_name(tensor.dtype)} {sizes}"
    yield "threads", str(setting.threads)
    yield "rounds", str(_rounds(bench))
    yield "torch", torch.__version__
    yield "instructions", ", ".join(sorted(compute.describe().processor.instructions))


def _rounds(bench: Bench) -> int:
    return max((len(times.seconds) for times in bench.times.values()), default=0)


def _as_json(bench: Bench) -> dict[str, object]:
    setting = bench.setting
    return {
        "file": str(setting.file),
        "region": {"device": str(setting.device), "dtype": dtype_name(setting.region.dtype)},
        "inputs": [
            {"name": path, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
            for path, tensor in setting.of_model.named_tensors()
        ],
        "threads": setting.threads,
        "rounds": _rounds(bench),
        "torch": torch.__version__,
        "amp_script": version("amp-script"),
        "instructions": sorted(compute.describe().processor.instructions),
        "ways": [_way_as_json(bench, name) for name in bench.names],
    }


def _way_as_json(bench: Bench, name: str) -> dict[str, object]:
    about: dict[str, object] = {"name": name, "about": CONTESTANTS[name].about}
    if name in bench.errors:
        return {**about, "error": bench.errors[name]}
    times = bench.times[name]
    return {
        **about,
        "median_ms": 1000 * times.median,
        "middle_half_ms": [1000 * end for end in times.middle],
        "least_ms": 1000 * times.least,
        "times_this_file": bench.ratio(name),
        "distance_to_float32": plain(bench.distances.get(name)),
    }


def draw(bench: Bench, file: Path) -> None:
    """Draw the medians as bars, the fastest at the top, each with the middle half of its rounds."""
    from matplotlib.figure import Figure

    ranked = sorted(bench.times, key=lambda name: bench.times[name].median, reverse=True)
    medians = [1000 * bench.times[name].median for name in ranked]
    middles = [[1000 * end for end in bench.times[name].middle] for name in ranked]
    whiskers = [
        [median - low for median, (low, _) in zip(medians, middles, strict=True)],
        [high - median for median, (_, high) in zip(medians, middles, strict=True)],
    ]
    figure = Figure(figsize=(7, 1.2 + 0.4 * len(ranked)), layout="constrained")
    axes = figure.subplots()
    colors = ["#1f77b4" if name == THIS_FILE else "#b0b7bf" for name in ranked]
    axes.barh(ranked, medians, xerr=whiskers, color=colors, ecolor="#404040", capsize=3)
    axes.set_xlabel(
        f"milliseconds: median and middle half of {_rounds(bench)} rounds, "
        f"{bench.setting.threads} threads"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
