"""What ``amp-script bench`` times a file against: one row a way of running the same model.

A way that computes in float32 gets the inputs in float32, and every run gets copies of its own,
because a model may change what it is given. ONNX Runtime and OpenVINO are installed by whoever
wants to compare with them, and imported only then.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import nn

import amp_script
from amp_script.calls import Call
from amp_script.compute import Compute
from amp_script.errors import AmpScriptError
from amp_script.regions import Region
from amp_script.structure import flatten

__all__ = ["CONTESTANTS", "PLANS", "THIS_FILE", "Contestant", "Run", "Setting", "Way"]

THIS_FILE: Final = "this file"
"""Name of the program that is compared with all others."""

PLANS: Final[tuple[Compute, ...]] = ("native", "upcast", "packed")
"""Names of the contestants that are the same file by one of its plans."""

Run: TypeAlias = Callable[[], object]
"""Runs the model once."""

Way: TypeAlias = Callable[[], Run]
"""Puts together what one run is given, outside of what is timed."""


@dataclass(frozen=True)
class Setting:
    """What there is to make contestants of.

    Attributes:
        file: the artifact.
        device: where all run.
        region: the region that eager autocast and the recipe run in.
        of_program: the inputs as the artifact takes them.
        model: the model that the artifact was made from, if it was named.
        of_model: the inputs as the model takes them.
        threads: how many the processor's kernels use.
    """

    file: Path
    device: torch.device
    region: Region
    of_program: Call
    model: nn.Module | None
    of_model: Call
    threads: int

    def the_model(self) -> nn.Module:
        """The model, or an error that says how to name it."""
        if self.model is None:
            raise AmpScriptError("needs the model: name it with --model TARGET")
        return self.model

    def autocast(self) -> torch.autocast:
        """A region for one call, with the cache, as people write it."""
        return torch.autocast(self.region.device_type, dtype=self.region.dtype)


@dataclass(frozen=True)
class Contestant:
    """One way of running the model.

    Attributes:
        about: what it is, for the legend.
        make: prepares it.
        needs_model: whether the artifact alone is not enough.
        packages: what has to be installed for it, as named to Python.
        as_torch: turns what a run returns into tensors of torch.
    """

    about: str
    make: Callable[[Setting], Way]
    needs_model: bool = True
    packages: tuple[str, ...] = ()
    as_torch: Callable[[Any], object] = lambda result: result

    def missing(self) -> list[str]:
        """The packages that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def _calls(program: Callable[..., object], call: Call) -> Way:
    """Calls of a program with arguments of their own."""

    def prepare() -> Run:
        args, kwargs = call.arguments(call.fresh())
        return lambda: program(*args, **kwargs)

    return prepare


def _with_plan(plan: Compute) -> Callable[[Setting], Way]:
    def make(setting: Setting) -> Way:
        program = amp_script.load(setting.file, compute=plan, map_location=setting.device)
        return _calls(program, setting.of_program)

    return make


def _eager(setting: Setting) -> Way:
    return _calls(setting.the_model(), setting.of_model.in_float32())


def _eager_autocast(setting: Setting) -> Way:
    return _in_region(_calls(setting.the_model(), setting.of_model), setting.autocast)


def _compiled(setting: Setting) -> Way:
    compiled: Any = torch.compile(setting.the_model())
    return _in_region(_calls(compiled, setting.of_model), setting.autocast)


def _in_region(way: Way, region: Callable[[], AbstractContextManager[object]]) -> Way:
    def prepare() -> Run:
        run = way()

        def in_region() -> object:
            with region():
                return run()

        return in_region

    return prepare


def _recipe(setting: Setting) -> Way:
    return _frozen(setting, setting.of_model, setting.region.enter)


def _frozen_float32(setting: Setting) -> Way:
    return _frozen(setting, setting.of_model.in_float32(), nullcontext)


def _frozen(
    setting: Setting, call: Call, region: Callable[[], AbstractContextManager[object]]
) -> Way:
    jit: Any = torch.jit
    model = _OnTensors(setting.the_model(), call)
    with region():
        frozen = jit.freeze(jit.trace(model, tuple(call.fresh()), check_trace=False))

    def prepare() -> Run:
        tensors = call.fresh()
        return lambda: frozen(*tensors)

    return prepare


class _OnTensors(nn.Module):
    """A model on the tensors of a call, and returning tensors, which is what tracers know."""

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.eval()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors in what the model returns, in order."""
        outputs, _ = flatten(self.call.run(self.model, tensors), "output")
        return tuple(outputs)


def _onnxruntime(setting: Setting) -> Way:
    onnxruntime: Any = importlib.import_module("onnxruntime")
    call = setting.of_model.in_float32()
    model = _OnTensors(setting.the_model(), call)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        torch.onnx.export(model, tuple(call.fresh()), file, dynamo=True, verbose=False)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = setting.threads
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]

    def prepare() -> Run:
        given = {name: tensor.numpy() for name, tensor in zip(names, call.fresh(), strict=True)}
        return lambda: session.run(None, given)

    return prepare


def _openvino(setting: Setting) -> Way:
    openvino: Any = importlib.import_module("openvino")
    call = setting.of_model.in_float32()
    model = _OnTensors(setting.the_model(), call)
    settings = {
        "INFERENCE_NUM_THREADS": setting.threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
    }
    converted = openvino.convert_model(model, example_input=tuple(call.fresh()))
    request = openvino.compile_model(converted, "CPU", settings).create_infer_request()

    def prepare() -> Run:
        given = [tensor.numpy() for tensor in call.fresh()]
        return lambda: request.infer(given)

    return prepare


def _from_arrays(arrays: Iterable[Any]) -> list[torch.Tensor]:
    return [torch.as_tensor(array) for array in arrays]


CONTESTANTS: Final[Mapping[str, Contestant]] = {
    THIS_FILE: Contestant(
        "the artifact, as it is loaded on this machine", _with_plan("auto"), False
    ),
    "native": Contestant("the artifact in reduced-precision kernels", _with_plan("native"), False),
    "upcast": Contestant("the artifact in float32 kernels", _with_plan("upcast"), False),
    "packed": Contestant("the same, weights packed", _with_plan("packed"), False),
    "eager-float32": Contestant("the model as it is", _eager),
    "eager-autocast": Contestant("the model under torch.autocast", _eager_autocast),
    "recipe": Contestant("torch.jit.trace under torch.autocast, then torch.jit.freeze", _recipe),
    "frozen-float32": Contestant("torch.jit.trace, then torch.jit.freeze", _frozen_float32),
    "compile": Contestant("torch.compile, under torch.autocast", _compiled),
    "onnxruntime": Contestant(
        "ONNX Runtime in float32",
        _onnxruntime,
        packages=("onnxruntime", "onnxscript", "onnx"),
        as_torch=_from_arrays,
    ),
    "openvino": Contestant(
        "OpenVINO in float32",
        _openvino,
        packages=("openvino",),
        as_torch=lambda result: _from_arrays(result.values()),
    ),
}
"""All of them, in the order in which they are shown."""
