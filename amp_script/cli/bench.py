"""``amp-script bench``: how fast an artifact is, beside other ways of running the same model."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

import amp_script
from amp_script.accuracy.difference import Difference, difference
from amp_script.artifact import read_metadata
from amp_script.calls import Call
from amp_script.cli import output, targets
from amp_script.cli.bench_report import Bench, draw, show
from amp_script.cli.contestants import CONTESTANTS, PLANS, THIS_FILE, Run, Setting, Way
from amp_script.cli.files import require_free, require_plots
from amp_script.cli.inputs import device_of, inputs_if_any, moved, program_call
from amp_script.cli.options import AsJson, FrozenFile, InputsTarget, Plot, PlotForce
from amp_script.cli.targets import ExampleInputs
from amp_script.errors import AmpScriptError, TracingError, UsageError
from amp_script.gist import gist
from amp_script.metadata import Metadata
from amp_script.regions import Region
from amp_script.requirements import require_runnable
from amp_script.structure import tensors_in
from amp_script.timing import WARM_UP, interleaved

Given = Callable[[], tuple[ExampleInputs, dict[str, object]]]

NAMES: Final = tuple(name for name in CONTESTANTS if name != THIS_FILE)


def command(
    file: FrozenFile,
    model_target: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="TARGET",
            help="The model that FILE was made from: `package.module:attribute` or "
            "`path/file.py:attribute`.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WAY",
            help=f"What to compare with, once for each: {', '.join(f'`{name}`' for name in NAMES)}"
            ", or `all` that can run here. If not given: with --model, all that run it and are "
            "installed; without, the plans that FILE has.",
        ),
    ] = None,
    input_specs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SPEC",
            help="An input, once for each, such as `1x3x224x224` or `ids=int64[0,30522):1x128`. "
            "Without any, inputs are made from what FILE says about its own.",
        ),
    ] = None,
    inputs_target: InputsTarget = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="DEVICE", help="Where to run all; FILE's own device if not given."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="How many threads to compute with; torch's own if not given."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, metavar="N", help="How many rounds to time, at most.")
    ] = 50,
    seconds: Annotated[
        float,
        typer.Option(
            min=0, metavar="S", help="For how long to start rounds, of which three run anyway."
        ),
    ] = 30,
    plot: Plot = None,
    as_json: AsJson = False,
    force: PlotForce = False,
) -> None:
    """Time a frozen file against other ways of running the same model.

    All ways run in one process, one run of each in every round, after runs that warm them up; shown
    are the median and the middle half of the rounds, and how far the results are from the model's
    in float32. A way that fails is shown with its error.

    Example: `amp-script bench resnet.pt --model models.py:resnet --against recipe`
    """
    if plot is not None:
        require_free(plot, force)
        require_plots(plot)
    given = inputs_if_any(input_specs, inputs_target)
    metadata = read_metadata(file)
    place = device_of(device or metadata.device)
    names = _names(against, _plans(metadata, place), with_model=model_target is not None)
    with _threads(threads), torch.no_grad(), redirect_stdout(sys.stderr):
        with output.step(f"loading {file}" + (f" and {model_target}" if model_target else "")):
            setting = _setting(file, metadata, place, model_target, given)
        bench = _run(setting, names, repeats, seconds)
    if plot is not None:
        with output.step(f"drawing {plot}"):
            draw(bench, plot)
    show(bench, as_json=as_json)
    if THIS_FILE in bench.errors:
        raise AmpScriptError(f"{file} itself fails: {bench.errors[THIS_FILE]}")


def _plans(metadata: Metadata, place: torch.device) -> list[str]:
    """The compute plans that a file has on a device."""
    if metadata.kind == "scripted":
        return []
    plans = PLANS if metadata.compute == "native" else (metadata.compute,)
    return [plan for plan in plans if plan == "native" or place.type == "cpu"]


def _names(against: Sequence[str] | None, plans: Sequence[str], *, with_model: bool) -> list[str]:
    """Which contestants take part, the file itself first.

    Raises:
        UsageError: one that is named does not exist, is not installed, needs the model, or is a
            plan that the file does not have.
    """
    for name in against or []:
        if name not in (*NAMES, "all"):
            raise UsageError(f"--against {name}: expected {', '.join(NAMES)} or all")
        if name != "all" and CONTESTANTS[name].missing():
            missing = CONTESTANTS[name].missing()
            raise UsageError(
                f"--against {name} needs {' and '.join(missing)}, not installed here: "
                f"pip install {' '.join(missing)}"
            )
        if name != "all" and CONTESTANTS[name].needs_model and not with_model:
            raise UsageError(f"--against {name} runs the model: name it with --model TARGET")
        if name in PLANS and name not in plans:
            raise UsageError(
                f"--against {name}: a plan that the file does not have here; it has "
                f"{', '.join(plans) or 'none'}"
            )
    if against and "all" not in against:
        return [THIS_FILE, *dict.fromkeys(against)]
    possible = [
        name
        for name, contestant in CONTESTANTS.items()
        if not contestant.missing()
        and (with_model or not contestant.needs_model)
        and (name in plans or name not in PLANS)
    ]
    if against or not with_model:
        return possible
    return [name for name in possible if name == THIS_FILE or CONTESTANTS[name].needs_model]


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _setting(
    file: Path,
    metadata: Metadata,
    place: torch.device,
    model_target: str | None,
    given: Given | None,
) -> Setting:
    program = amp_script.load(file, map_location=place)
    model = None if model_target is None else targets.load_model(model_target).to(place)
    values = None if given is None else moved(given(), place)
    of_program = program_call(program, values)
    of_model = _model_call(model or program, values, of_program)
    region = Region.resolve(place.type, metadata.dtype)
    if model is not None:
        require_runnable(model, of_model, region)
    return Setting(file, place, region, of_program, model, of_model, torch.get_num_threads())


def _model_call(
    model: torch.nn.Module,
    values: tuple[ExampleInputs, dict[str, object]] | None,
    of_program: Call,
) -> Call:
    """The inputs of a program as the model takes them.

    Raises:
        TracingError: the model does not take them.
    """
    if values is not None:
        return Call.bind(model, *values)
    _, made = of_program.arguments()
    try:
        return Call.bind(model, made)
    except TracingError:
        # Parameters such as *args have names in the program that the model does not know.
        return Call.bind(model, tuple(made.values()))


def _run(setting: Setting, names: Sequence[str], repeats: int, seconds: float) -> Bench:
    errors: dict[str, str] = {}
    ways: dict[str, Way] = {}
    results: dict[str, object] = {}
    ready: dict[str, Run] = {}

    def fails(name: str, error: Exception) -> None:
        # Of this library's errors every line counts.
        whole = isinstance(error, AmpScriptError)
        kind = type(error).__name__
        errors[name] = f"{kind}: {output.one_line(str(error))}" if whole else gist(error)

    def make_ready(name: str) -> None:
        ready[name] = ways[name]()

    def run(name: str) -> object:
        return ready[name]()

    for name in names:
        with output.step(f"preparing {name}"), _others_quiet():
            try:
                ways[name] = _synchronised(CONTESTANTS[name].make(setting), setting.device)
                for _ in range(WARM_UP):
                    results[name] = ways[name]()()
            except Exception as error:
                ways.pop(name, None)
                fails(name, error)
    distances = _distances(setting, results)
    gc.collect()
    with output.progress("timing", repeats) as after_round:
        times = interleaved(
            {name: functools.partial(run, name) for name in ways},
            repeats=repeats,
            warm_up=1,
            seconds=seconds,
            before_run=make_ready,
            after_round=after_round,
            on_error=fails,
        )
    return Bench(setting, names, times, errors, distances)


def _synchronised(way: Way, device: torch.device) -> Way:
    """Let a run begin when its inputs are there, and end when the device has computed, not when it
    has been told to.
    """
    if device.type == "cpu":
        return way
    synchronize = torch.get_device_module(device).synchronize

    def prepare() -> Run:
        run = way()
        synchronize()

        def run_to_the_end() -> object:
            result = run()
            synchronize()
            return result

        return run_to_the_end

    return prepare


def _distances(setting: Setting, results: Mapping[str, object]) -> dict[str, Difference]:
    """How far each result is from float32; without those that hold other tensors than the model's.

    Tensors are compared in order, because a traced program has no names for them.
    """
    if setting.model is None:
        return {}
    call = setting.of_model.in_float32()
    try:
        wanted = dict(tensors_in(call.run(setting.model, call.fresh()), "output"))
    except Exception:
        return {}  # a model in a lower precision, which has no float32 to be compared with
    distances = {}
    for name, result in results.items():
        found = [tensor for _, tensor in tensors_in(CONTESTANTS[name].as_torch(result), "output")]
        if len(found) == len(wanted):
            distance = difference(dict(zip(wanted, found, strict=True)), wanted)
            if distance is not None:
                distances[name] = distance
    return distances


@contextmanager
def _others_quiet() -> Iterator[None]:
    """Keep what tracers and exporters say about their work from view."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
