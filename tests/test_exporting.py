"""``amp_script.export``: torch.export's programs with the bits of the installed eager autocast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from versions import exports_what_sets_attributes, loads_exported_programs

import amp_script
from amp_script.errors import (
    ArgumentError,
    ArtifactError,
    ExportError,
    TracingError,
    VerificationError,
)
from amp_script.exporting import inputs_of, save_exported
from amp_script.jit_state import AmbientState
from amp_script.structure import flatten

pytestmark = pytest.mark.filterwarnings(
    # torch.export copies and reads specs by names that torch itself deprecates.
    "ignore:`isinstance:FutureWarning",
)


class Nested(nn.Module):
    """A dictionary and a tuple in, a dictionary out, and regions of its own inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, batch, pair, *, scale: float = 2.0):
        hidden = self.first(batch["x"]).tanh()
        with amp_script.autocast("cpu", enabled=False):
            exact = self.second(hidden.float())
        with torch.autocast("cpu", torch.float16):
            half = torch.mm(hidden.float(), batch["x"].t())
        return {"exact": exact * scale, "half": half, "pair": (pair[0] + hidden, pair[1])}


class Composites(nn.Module):
    """Operators whose inside eager autocast casts."""

    def forward(self, x, y):
        return torch.einsum("ij,kj->ik", x, y), torch.tensordot(x, y, 2)


class Attention(nn.Module):
    """Heads of 4, as torch's kernels take them."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Convolutional(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())


X = torch.randn(3, 8)
CASES: Mapping[str, tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "nested": (Nested, ({"x": X}, (torch.randn(8), torch.ones(2))), {"scale": 3.0}),
    "composites": (Composites, (X, X), {}),
    "convolution": (Convolutional, (torch.randn(2, 3, 8, 8),), {}),
    "recurrent": (lambda: nn.GRU(8, 8), (torch.randn(5, 2, 8),), {}),
    "attention": (Attention, (torch.randn(2, 5, 8),), {}),
}


def _eager(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> object:
    with torch.no_grad(), torch.autocast("cpu", dtype):
        return model(*args, **kwargs)


def _assert_same(got: object, expected: object) -> None:
    (given, one), (wanted, other) = flatten(got, "output"), flatten(expected, "output")
    assert one == other
    for a, b in zip(given, wanted, strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


@pytest.fixture(autouse=True)
def nothing_is_left_changed() -> Any:
    before = AmbientState.current()
    yield
    assert AmbientState.current() == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:The tensor attributes? self._flat_weights:UserWarning")
@loads_exported_programs
def test_the_program_is_eager_autocast_wherever_it_runs(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    if case == "recurrent" and not exports_what_sets_attributes():
        pytest.skip("torch.export of this torch takes no forward that sets attributes")
    make, args, kwargs = CASES[case]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    forward = model.forward
    program = amp_script.export(model, args, example_kwargs=kwargs, dtype=dtype)
    assert model.forward == forward
    assert "forward" not in vars(model)
    assert program.state_dict.keys() == model.state_dict().keys()
    save_exported(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    expected = _eager(model, args, kwargs, dtype)
    with torch.no_grad():
        for _ in range(2):
            _assert_same(loaded(*args, **kwargs), expected)
        with torch.autocast("cpu", torch.bfloat16 if dtype is torch.float16 else torch.float16):
            _assert_same(loaded(*args, **kwargs), expected)


def test_sizes_that_vary_are_free_and_others_are_not() -> None:
    model = Nested().eval()
    batches = [({"x": torch.randn(n, 8)}, (torch.randn(8), torch.ones(2))) for n in (3, 5, 4)]
    program = amp_script.export(model, batches[0], check_inputs=[batches[1]])
    assert [(spec.name, spec.shape) for spec in inputs_of(program)] == [
        ("batch_x", (None, 8)),
        ("pair_0", (8,)),
        ("pair_1", (2,)),
    ]
    with torch.no_grad():
        got = program.module()(*batches[2])
    _assert_same(got, _eager(model, batches[2], {}, torch.bfloat16))
    with pytest.raises((AssertionError, RuntimeError), match=r"Guard failed|Expected input"):
        program.module()(batches[2][0], (torch.randn(8), torch.ones(3)))


def test_keyword_inputs_that_vary() -> None:
    def batch(size: int) -> dict[str, object]:
        return {"batch": {"x": torch.randn(size, 8)}, "pair": (torch.randn(8), torch.ones(2))}

    program = amp_script.export(Nested().eval(), batch(3), check_inputs=[batch(5)])
    program.module()(**batch(7))


def test_keyword_inputs_in_another_order() -> None:
    def batch(size: int) -> dict[str, object]:
        return {"batch": {"x": torch.randn(size, 8)}, "pair": (torch.randn(8), torch.ones(2))}

    other = dict(reversed(batch(5).items()))
    program = amp_script.export(Nested().eval(), batch(3), check_inputs=[other])
    assert [spec.shape for spec in inputs_of(program)] == [(None, 8), (8,), (2,)]


class Variable(nn.Module):
    """Takes any number of arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, first, /, *rest, scale=1.0, **named):
        return self.layer(first) * scale + sum(rest) + named["last"][0]


def test_sizes_of_variable_arguments_that_vary() -> None:
    def inputs(size: int) -> tuple[torch.Tensor, ...]:
        return torch.randn(size, 8), torch.randn(size, 8), torch.randn(1, 8)

    kwargs = {"last": [torch.randn(8)], "scale": 2.0}
    model = Variable().eval()
    program = amp_script.export(
        model, inputs(3), example_kwargs=kwargs, check_inputs=[inputs(4), inputs(5)]
    )
    assert [(spec.name, spec.shape) for spec in inputs_of(program)] == [
        ("first", (None, 8)),
        ("rest_0", (None, 8)),
        ("rest_1", (1, 8)),
        ("last_0", (8,)),
    ]
    given = inputs(7)
    with torch.no_grad():
        got = program.module()(*given, **kwargs)
    _assert_same(got, _eager(model, given, kwargs, torch.bfloat16))


class Several(nn.Module):
    def forward(self, tensors, flag=True, other=None):
        return [tensor * 2 if flag else tensor for tensor in tensors]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (([X], True), r"tensors is a list with 0 in check_inputs\[1\], and a list with 0, 1 in"),
        (((X, X), True), "tensors is a tuple with 0, 1 in"),
        (([X, None], True), r"tensors\[1\] is None in check_inputs\[1\], and a tensor in example_"),
        (([X, X[0]], True), r"tensors\[1\] has another number of dimensions in check_inputs\[1\]"),
        (([X, X], False), r"flag is False in check_inputs\[1\], and True in example_inputs"),
        (([X, X], 1), r"flag is 1 in check_inputs\[1\], and True in example_inputs"),
        (([X, X], True, X), r"\[1\] gives 'tensors', 'flag', 'other', and .* 'tensors', 'flag':"),
        (([X, X],), r"\[1\] gives 'tensors', and example_inputs 'tensors', 'flag'"),
    ],
)
def test_check_inputs_that_one_program_cannot_take(inputs: Any, message: str) -> None:
    example = [X, X], True
    with pytest.raises(ExportError, match=message + ".*; export one for each"):
        amp_script.export(Several().eval(), example, check_inputs=[example, inputs])


def test_float32_at_the_border_and_inside() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    program = amp_script.export(model, X, output_dtype=torch.float32)
    expected = _eager(model, (X,), {}, torch.bfloat16)
    assert isinstance(expected, torch.Tensor)
    _assert_same(program.module()(X).detach(), expected.float())

    kept = amp_script.export(model, X, keep_float32=["2"])
    with amp_script.keep_float32(model, "2"):
        expected = _eager(model, (X,), {}, torch.bfloat16)
    _assert_same(kept.module()(X).detach(), expected)


class _Twice(nn.Linear):
    """Has a parent whose ``forward`` it calls."""

    def forward(self, input):
        return super().forward(super().forward(input))


class Shared(nn.Module):
    """Submodules with several names, of which torch.export runs stand-ins."""

    def __init__(self) -> None:
        super().__init__()
        self.one = self.other = nn.Linear(8, 8)
        self.twice = self.again = _Twice(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), self.twice)
        self.wrapped = nn.ModuleList([self.block])
        self.own = nn.Linear(8, 8)
        forward = self.own.forward
        self.own.forward = lambda input: forward(input) + 1  # type: ignore[method-assign]  # as some libraries do

    def forward(self, x):
        hidden = self.twice(self.other(self.one(x)))
        return hidden, self.wrapped[0](hidden), self.again.forward(hidden), self.own(x)


@pytest.mark.parametrize(
    "pattern", ["one", "other", "twice", "again", "block", "wrapped.0.1", "own", "", "*"]
)
def test_submodules_with_several_names_stay_in_float32(pattern: str) -> None:
    model = Shared().eval()
    program = amp_script.export(model, X, keep_float32=[pattern])
    with amp_script.keep_float32(model, pattern):
        expected = _eager(model, (X,), {}, torch.bfloat16)
    with torch.no_grad():
        _assert_same(program.module()(X), expected)
    traced = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=[pattern])
    _assert_same(traced(X), expected)


def test_an_inference_kernel_that_is_not_recorded_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with pytest.raises(VerificationError, match=r"mha\.set_fastpath_enabled\(False\)"):
        amp_script.export(model, x)
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    program = amp_script.export(model, x)
    with torch.no_grad():
        _assert_same(program.module()(x), _eager(model, (x,), {}, torch.bfloat16))


def test_an_input_that_is_passed_twice_is_two_inputs() -> None:
    class Same(nn.Module):
        def forward(self, x, y):
            return x * 2 if x is y else x @ y

    program = amp_script.export(Same().eval(), (torch.ones(2, 2), torch.ones(2, 2)))
    again = amp_script.export(Same().eval(), (torch.ones(2, 2),) * 2)
    assert again.graph_module.code == program.graph_module.code


class _Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x


class _Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no such thing")


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (_Branching(), {}, ExportError, "torch.export cannot take the model: "),
        (_Failing(), {}, ExportError, "ZeroDivisionError: no such thing"),
        (nn.Linear(8, 2).train(), {}, TracingError, "training mode"),
        (nn.Linear(9, 2), {}, ExportError, "torch.export cannot take the model"),
        (torch.relu, {}, ExportError, "is a builtin_function_or_method: torch.export takes"),
        (nn.Linear(8, 2), {"check_inputs": X}, TracingError, "expected a list of inputs"),
        (nn.Linear(8, 2), {"output_dtype": "float32"}, ArgumentError, "Give torch.float32"),
        (
            nn.Linear(8, 2),
            {"check_inputs": [torch.randn(2, 3, 8)]},
            ExportError,
            "input has another number of dimensions",
        ),
    ],
)
def test_what_cannot_be_exported(
    model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    if isinstance(model, nn.Module) and "training" not in message:
        model.eval()
    with pytest.raises(error, match=message):
        amp_script.export(model, X, **options)
    assert not isinstance(model, nn.Module) or "forward" not in vars(model)


def test_a_program_that_differs_is_refused() -> None:
    if not exports_what_sets_attributes():
        pytest.skip("torch.export of this torch takes no forward that sets attributes")

    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + self.calls

    model = Counting().eval()
    with pytest.raises(VerificationError, match="differs from eager autocast"):
        amp_script.export(model, X)
    assert model.calls == 0
    amp_script.export(model, X, verify=False)


def _half_written(program: object, path: Path) -> None:
    path.write_bytes(b"PK")
    raise ZeroDivisionError


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    file.write_text("precious")
    program = amp_script.export(nn.Linear(8, 2).eval(), X)
    with pytest.raises(ArtifactError, match="cannot write there"):
        save_exported(program, tmp_path / "no" / "model.pt2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.export, "save", _half_written)
        with pytest.raises(ZeroDivisionError):
            save_exported(program, file)
    assert file.read_text() == "precious"
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt2"}
