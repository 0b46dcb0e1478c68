"""The frozen module: the same result wherever it is called, and wrong calls named."""

from __future__ import annotations

import copy
import io
import pickle
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from amp_script import jit_autocast_pass, trace_and_freeze
from amp_script.errors import InputError
from amp_script.frozen import FrozenModule
from amp_script.metadata import InputSpec, Metadata
from amp_script.structure import named_leaves

PLANS = ["native", "upcast", "packed"]


class Layers(nn.Module):
    """A convolution and a product, so that every plan has something to change."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 260)
        self.output = nn.Linear(260, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.convolution(x)).flatten(2).transpose(1, 2)
        return self.output(self.linear(y))


@pytest.fixture(params=PLANS)
def frozen(request: pytest.FixtureRequest) -> FrozenModule:
    return freeze(request.param)


def freeze(compute: Any) -> FrozenModule:
    torch.manual_seed(0)
    return trace_and_freeze(Layers().eval(), (example(),), compute=compute, verify=False)


def example() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 6 * 6).reshape(2, 3, 6, 6)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def test_it_is_a_script_module(frozen: FrozenModule) -> None:
    assert isinstance(frozen, torch.jit.ScriptModule)
    assert not list(frozen.parameters())
    assert "aten::" in str(frozen.graph)
    assert "def forward" in frozen.code
    assert "def forward" in frozen.forward.code
    assert "Layers" in repr(frozen)


def test_compute_says_which_plan_runs(frozen: FrozenModule) -> None:
    assert frozen.compute in PLANS
    assert frozen.metadata.compute == "native"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pass_enabled", [True, False])
def test_ambient_autocast_and_the_pass_flag_change_nothing(
    frozen: FrozenModule, dtype: torch.dtype, pass_enabled: bool
) -> None:
    expected = freeze(frozen.compute)(example())
    for _ in range(3):
        with jit_autocast_pass(pass_enabled), torch.autocast("cpu", dtype):
            assert equal(frozen(example()), expected)
            assert equal(frozen.forward(x=example()), expected)
        assert equal(frozen(example()), expected)


def test_threads_with_other_ambient_states_get_the_same(frozen: FrozenModule) -> None:
    expected = freeze(frozen.compute)(example())
    wrong: list[object] = []
    # A thread of its own counts its OpenMP threads anew; the plan asks for as many as it was
    # packed on.
    threads = torch.get_num_threads()

    def call(dtype: torch.dtype, enabled: bool) -> None:
        torch.set_num_threads(threads)
        with torch.autocast("cpu", dtype, enabled=enabled):
            wrong.extend(None for _ in range(5) if not equal(frozen(example()), expected))

    states = [(torch.bfloat16, True), (torch.float16, True), (torch.bfloat16, False)] * 2
    workers = [threading.Thread(target=call, args=state) for state in states]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_it_leaves_the_callers_autocast_as_it_was(frozen: FrozenModule) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        frozen(example())
        assert torch.is_autocast_enabled("cpu")
        with pytest.raises(InputError):
            frozen(example().half())
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda m, x: m(), r"expected 1 inputs \(x\), given none"),
        (
            lambda m, x: m(x, x),
            r"expected 1 inputs \(x\), given 2 by position.* freeze the model with it in",
        ),
        (lambda m, x: m(x, x=x), r"expected 1 inputs \(x\), given 1 by position, x="),
        (
            lambda m, x: m(y=x),
            r"expected 1 inputs \(x\), given y=\. What the example left out when the model was "
            r"frozen is no input of the program: freeze the model with y in the example",
        ),
        (
            lambda m, x: m(x.half()),
            r"x: expected float32 tensor of rank 4 on cpu, given float16 tensor of rank 4 "
            r"\(shape \[2, 3, 6, 6\]\) on cpu",
        ),
        (lambda m, x: m(x[0]), r"x: expected .* rank 4 on cpu, given float32 tensor of rank 3"),
        (lambda m, x: m(x.to("meta")), r"x: expected .* on cpu, given .* on meta"),
        (lambda m, x: m(3), r"x: expected float32 tensor of rank 4 on cpu, given int 3"),
        (lambda m, x: m(None), r"x: expected float32 tensor of rank 4 on cpu, given None"),
        (lambda m, x: m([x]), r"x: expected .* of rank 4 on cpu, given a list with 0"),
        (lambda m, x: m({"x": x}), r"x: expected .* of rank 4 on cpu, given a dict with 'x'"),
        (lambda m, x: m([object()]), r"x: expected .* rank 4 on cpu, given list \[<object"),
    ],
)
def test_a_wrong_call_is_named(
    frozen: FrozenModule, call: Callable[[FrozenModule, torch.Tensor], object], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        call(frozen, example())


def test_other_sizes_are_right_calls(frozen: FrozenModule) -> None:
    native = freeze("native")
    for sizes in [(1, 3, 6, 6), (2, 3, 9, 5)]:
        x = torch.rand(sizes)
        torch.testing.assert_close(frozen(x), native(x), rtol=0.05, atol=0.05)


def test_a_usual_call_runs_little_python(frozen: FrozenModule) -> None:
    """Each function that a call runs costs microseconds after a model has emptied the caches."""
    for _ in range(3):
        frozen(example())
    called = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("amp_script"):
            called.append(frame.f_code.co_name)

    x = example()
    sys.setprofile(note)
    try:
        frozen(x)
    finally:
        sys.setprofile(None)
    assert "_are_plain" in called
    assert not {"_bind", "named_leaves", "to_script"}.intersection(called)
    assert frozen.compute != "native" or len(called) <= 6, called


class Image(torch.Tensor):
    """A subclass of tensors that overrides nothing."""


class Noted(torch.Tensor):
    """A subclass of tensors that sees the functions that are called with it."""

    calls = 0

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Pair(NamedTuple):
    first: torch.Tensor
    rest: list[torch.Tensor]


RESULTS: dict[str, Callable[[torch.Tensor], object]] = {
    "tensor": lambda y: y,
    "dictionary": lambda y: {"y": y, "again": y + 1},
    "dictionary of several types": lambda y: {"y": y, "flag": True, "pair": (y + 1, y + 2)},
    "named tuple": lambda y: Pair(y, [y + 1]),
}


@pytest.mark.parametrize("kind", [Image, Noted, nn.Parameter])
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("compute", PLANS)
def test_a_subclass_of_tensors_gets_what_eager_mode_gives_it(
    compute: Any, result: str, kind: Any
) -> None:
    linear = nn.Linear(8, 8).eval()

    def model(x: torch.Tensor) -> object:
        return RESULTS[result](linear(x))

    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    frozen = trace_and_freeze(model, x, dtype=torch.bfloat16, compute=compute, verify=False)
    given = nn.Parameter(x) if kind is nn.Parameter else x.as_subclass(kind)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = named_leaves("output", model(given))
        plain = named_leaves("output", frozen(x))
        for got in (frozen(given), frozen(x=given)):
            leaves = named_leaves("output", got)
            assert [type(leaf) for _, leaf in leaves] == [type(leaf) for _, leaf in wanted]
            for (path, leaf), (plain_path, value) in zip(leaves, plain, strict=True):
                assert path == plain_path
                assert leaf is value or torch.equal(leaf, value)


def test_nested_inputs_are_checked_by_path() -> None:
    class Nested(nn.Module):
        def forward(
            self, pair: tuple[torch.Tensor, torch.Tensor], batch: dict[str, torch.Tensor]
        ) -> torch.Tensor:
            return pair[0] @ pair[1] + batch["bias"]

    x, bias = torch.rand(4, 4), torch.rand(4)
    frozen = trace_and_freeze(
        Nested().eval(), ((x, x), {"bias": bias}), compute="upcast", verify=False
    )
    frozen((x, x), {"bias": bias})
    with pytest.raises(InputError, match=r"pair\[1\]: expected float32 .*, given float64"):
        frozen((x, x.double()), {"bias": bias})
    with pytest.raises(InputError, match=r"batch\['bias'\]: expected float32 .*, given nothing"):
        frozen((x, x), {"weight": bias})
    with pytest.raises(InputError, match=r"batch\['other'\]: expected nothing, given float32"):
        frozen((x, x), {"bias": bias, "other": bias})
    with pytest.raises(InputError, match=r"batch\['bias'\]: expected .* given a tuple with 0, 1"):
        frozen((x, x), {"bias": (bias, bias)})
    with pytest.raises(InputError, match=r"batch\['bias'\]: expected float32 .*, given nothing"):
        frozen((x, x), [object()])


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.double(),
        lambda m: m.type(torch.float16),
        lambda m: m.to(torch.float16),
        lambda m: m.to(dtype=torch.float32),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.to(torch.zeros(1)),
    ],
)
def test_another_dtype_is_refused(
    frozen: FrozenModule, convert: Callable[[FrozenModule], object]
) -> None:
    with pytest.raises(RuntimeError, match=r"would leave its constants .* dtype=\.\.\."):
        convert(frozen)


@pytest.mark.parametrize(
    "move", [lambda m: m.cuda(), lambda m: m.to("cuda"), lambda m: m.to("meta")]
)
def test_another_device_is_refused(
    frozen: FrozenModule, move: Callable[[FrozenModule], object]
) -> None:
    with pytest.raises(RuntimeError, match="map_location="):
        move(frozen)


def test_moving_nowhere_is_allowed(frozen: FrozenModule) -> None:
    assert frozen.to("cpu") is frozen
    assert frozen.to(torch.device("cpu"), non_blocking=True) is frozen
    assert frozen.cpu() is frozen
    assert frozen.eval() is frozen


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy])
def test_a_copy_computes_the_same(
    frozen: FrozenModule, duplicate: Callable[[FrozenModule], FrozenModule]
) -> None:
    other = duplicate(frozen)
    assert type(other) is FrozenModule
    assert other.compute == frozen.compute
    assert equal(other(example()), frozen(example()))


def test_pickling_is_refused_as_for_every_script_module(frozen: FrozenModule) -> None:
    with pytest.raises(RuntimeError, match="__getstate__"):
        pickle.dumps(frozen)


class Pipeline(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def test_a_module_around_it_holds_the_whole_storable_program(frozen: FrozenModule) -> None:
    native = freeze("native")(example()) * 2
    before = frozen(example())
    scripted = torch.jit.script(Pipeline(frozen))
    assert equal(scripted(example()), native)
    # Tracing takes the storable program too, so torch's check against the plan must be off.
    traced = torch.jit.trace(Pipeline(frozen), example(), check_trace=False)
    assert equal(traced(example()), native)
    buffer = io.BytesIO()
    torch.jit.save(scripted, buffer)
    buffer.seek(0)
    assert equal(torch.jit.load(buffer)(example()), native)
    assert equal(frozen(example()), before)


@pytest.mark.parametrize("compute", ["upcast", "packed"])
def test_threads_may_ask_for_the_storable_program_at_once(compute: Any) -> None:
    failures: list[Exception] = []
    together = threading.Barrier(8)

    def read(frozen: FrozenModule) -> None:
        together.wait()
        try:
            _ = frozen._c
        except Exception as error:  # whatever it is, the test shows it
            failures.append(error)

    for _ in range(5):
        frozen = freeze(compute)
        workers = [threading.Thread(target=read, args=(frozen,)) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert failures == []


def test_torch_saves_the_storable_program_with_its_metadata(frozen: FrozenModule) -> None:
    buffer = io.BytesIO()
    torch.jit.save(frozen, buffer)
    buffer.seek(0)
    extra_files = {"amp_script.json": ""}
    loaded = torch.jit.load(buffer, _extra_files=extra_files)
    assert equal(loaded(example()), freeze("native")(example()))
    metadata = Metadata.from_json(extra_files["amp_script.json"])
    assert metadata.inputs == frozen.metadata.inputs
    assert metadata.oldest_libtorch is not None


class Counting(nn.Module):
    """Keeps a buffer that a method reads, as preserved attributes are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.offset


@pytest.mark.parametrize("compute", PLANS)
def test_preserved_attributes_are_the_programs(compute: Any) -> None:
    x = torch.rand(4, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        traced = torch.jit.trace(Counting().eval(), x, check_trace=False)
    frozen = FrozenModule.wrap(
        torch.jit.freeze(traced, preserved_attrs=["offset"]),
        Metadata("frozen", torch.bfloat16, "cpu", (InputSpec.of_tensor("x", x),)),
        compute=compute,
    )
    assert frozen.compute == compute
    before = frozen(x)
    frozen.offset = torch.ones(8)
    assert equal(frozen(x), before + 1)
    assert torch.equal(frozen.offset, torch.ones(8))


def test_an_attribute_that_would_hide_ours_is_refused() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("metadata", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.metadata

    module = torch.jit.freeze(torch.jit.script(Named().eval()), preserved_attrs=["metadata"])
    with pytest.raises(ValueError, match="'metadata' would hide"):
        FrozenModule.wrap(module, Metadata("frozen", None, "cpu"))


class Defaults(nn.Module):
    def forward(self, x: torch.Tensor, times: int = 2, shift: float = 0.5) -> torch.Tensor:
        return (x.to(torch.bfloat16) @ x.to(torch.bfloat16)) * times + shift


@pytest.mark.parametrize("compute", PLANS)
def test_defaults_and_keywords_reach_the_program(compute: Any) -> None:
    x = torch.rand(4, 4)
    plain = torch.jit.freeze(torch.jit.script(Defaults().eval()))
    expected = [plain(x), plain(x, 3), plain(x, shift=1.5), plain(times=1, x=x)]
    inputs = (InputSpec.of_tensor("x", x),)
    frozen = FrozenModule.wrap(
        torch.jit.freeze(torch.jit.script(Defaults().eval())),
        Metadata("frozen", torch.bfloat16, "cpu", inputs),
        compute=compute,
    )
    given = [frozen(x), frozen(x, 3), frozen(x, shift=1.5), frozen(times=1, x=x)]
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)
        assert one.dtype == other.dtype


class DefaultsAlone(nn.Module):
    def forward(self, times: int = 2) -> torch.Tensor:
        return torch.ones(2) * times


def test_a_call_with_nothing_takes_the_defaults() -> None:
    program = torch.jit.freeze(torch.jit.script(DefaultsAlone().eval()))
    frozen = FrozenModule.wrap(program, Metadata("frozen", torch.bfloat16, "cpu", ()))
    assert equal(frozen(), torch.full((2,), 2.0))
    assert equal(frozen(3), torch.full((2,), 3.0))
