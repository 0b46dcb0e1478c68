"""``amp-script export-triton``: what it writes, and what it refuses before anything is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("typer", reason="the command needs the extra `cli`")

import amp_script
from amp_script.calls import Call
from amp_script.cli.app import run
from amp_script.errors import ExportError
from amp_script.structure import flatten
from amp_script.triton import repository, write_repository

FLOAT32 = torch.float32


class Tagger(nn.Module):
    """Nested inputs, an argument that is held fast, and a dictionary that holds a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.out = nn.Linear(16, 4)

    def forward(self, batch, pair, mask, scale=1.0):
        hidden = self.embed(batch["ids"]) * mask.unsqueeze(-1)
        tags = self.out(hidden) * scale + pair[0] + pair[1][0]
        return {"tags": tags, "of": (tags.argmax(-1), None, tags > 0)}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def _save(model: object, inputs: Any, file: str = "net.pt", **options: Any) -> amp_script.load:
    frozen = amp_script.trace_and_freeze(model, inputs, **{"output_dtype": FLOAT32, **options})
    amp_script.save(frozen, file)
    return frozen


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


# --- a reader of the text format, of as much of it as a configuration has -------------------------

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.-]+|[\[\]{}:,]')


def _read(text: str) -> dict[str, Any]:
    assert not _TOKEN.sub("", text).strip()
    tokens = _TOKEN.findall(text)
    message = _message(tokens)
    assert not tokens
    return message


def _message(tokens: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while tokens and tokens[0] != "}":
        field = tokens.pop(0)
        if tokens[0] == ":":
            tokens.pop(0)
        values = _value(tokens)
        if isinstance(values, list):
            found.setdefault(field, []).extend(values)
        else:
            assert field not in found
            found[field] = values
    return found


def _value(tokens: list[str]) -> Any:
    token = tokens.pop(0)
    if token == "{":
        message = _message(tokens)
        assert tokens.pop(0) == "}"
        return message
    if token != "[":
        return (
            token[1:-1] if token[0] == '"' else int(token) if token.strip("-").isdigit() else token
        )
    values = []
    while tokens[0] != "]":
        values.append(_value(tokens))
        if tokens[0] == ",":
            tokens.pop(0)
    tokens.pop(0)
    return values


def _config(place: str) -> dict[str, Any]:
    return _read(Path(place, "config.pbtxt").read_text())


def _port(name: str, kind: str, *dims: int) -> dict[str, Any]:
    return {"name": name, "data_type": kind, "dims": list(dims)}


# --- what is written ------------------------------------------------------------------------------


def test_a_program_that_is_served_as_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = _save(_net(), torch.randn(3, 8))
    assert run(["export-triton", "net.pt", "-o", "models"]) == 0
    assert "output OUTPUT__0  float32 3x4, output" in capsys.readouterr().out
    assert _config("models/net") == {
        "name": "net",
        "backend": "pytorch",
        "platform": "pytorch_libtorch",
        "max_batch_size": 0,
        "input": [_port("input", "TYPE_FP32", 3, 8)],
        "output": [_port("OUTPUT__0", "TYPE_FP32", 3, 4)],
        "instance_group": [{"kind": "KIND_CPU"}],
    }
    x = torch.randn(3, 8)
    with torch.no_grad():
        assert torch.equal(torch.jit.load("models/net/1/model.pt")(x), frozen(x))
    assert amp_script.load("models/net/1/model.pt").metadata == amp_script.load("net.pt").metadata
    assert {path.name for path in folder.rglob("*")} == {
        *("net.pt", "models", "net", "config.pbtxt", "1", "model.pt")
    }


def test_nested_inputs_and_outputs_become_tensors() -> None:
    batch = {"ids": torch.arange(6).reshape(2, 3)}
    pair = (torch.randn(4), [torch.randn(1)])
    options = {"example_kwargs": {"mask": torch.ones(2, 3), "scale": 3.0}}
    frozen = _save(Tagger().eval(), (batch, pair), "tagger.pt", **options)
    assert run(["export-triton", "tagger.pt", "-o", "models", "--name", "tags-2"]) == 0
    config = _config("models/tags-2")
    assert config["input"] == [
        _port("batch_ids", "TYPE_INT64", 2, 3),
        _port("pair_0", "TYPE_FP32", 4),
        _port("pair_1_0", "TYPE_FP32", 1),
        _port("mask", "TYPE_FP32", 2, 3),
    ]
    assert config["output"] == [
        _port("tags__0", "TYPE_FP32", 2, 3, 4),
        _port("of__1", "TYPE_INT64", 2, 3),
        _port("of__2", "TYPE_BOOL", 2, 3, 4),
    ]
    served = torch.jit.load("models/tags-2/1/model.pt")
    arguments = served.forward.schema.arguments[1:]
    assert [argument.name for argument in arguments] == [port["name"] for port in config["input"]]
    assert {argument.type.kind() for argument in arguments} == {"TensorType"}
    given = {"ids": torch.tensor([[5, 9, 1], [0, 2, 3]])}
    for _ in range(3):
        with torch.no_grad():
            got = served(given["ids"], pair[0], pair[1][0], options["example_kwargs"]["mask"])
            expected = frozen(given, pair, torch.ones(2, 3), 3.0)
        assert isinstance(got, tuple)
        wanted = (expected["tags"], expected["of"][0], expected["of"][2])
        assert all(map(torch.equal, got, wanted))


class Shifted(nn.Module):
    """A convolution that freezing would merge with what follows, rounding otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.register_buffer("shift", torch.rand(8, 1, 1))

    def forward(self, images):
        with torch.autocast("cpu", enabled=False):
            return self.layer(images[0].float()) * 1.7 + self.shift


def test_what_is_put_around_a_program_leaves_its_bits() -> None:
    images = [torch.randn(1, 3, 16, 16)]
    frozen = _save(Shifted().eval(), (images,))
    assert run(["export-triton", "net.pt", "-o", "models"]) == 0
    served = torch.jit.load("models/net/1/model.pt")
    with torch.no_grad():
        assert torch.equal(served(images[0])[0], frozen(images))


def test_one_dictionary_is_what_the_backend_takes() -> None:
    _save(
        lambda batch: batch["a b"] + batch["c"],
        {"batch": {"a b": torch.ones(2), "c": torch.ones(2)}},
    )
    assert run(["export-triton", "net.pt", "-o", "models"]) == 0
    assert [port["name"] for port in _config("models/net")["input"]] == ["a b", "c"]
    (argument,) = torch.jit.load("models/net/1/model.pt").forward.schema.arguments[1:]
    assert argument.type.kind() == "DictType"


def test_names_that_collide_are_told_apart() -> None:
    def model(a: Any, a_x: torch.Tensor) -> torch.Tensor:
        return a["x"] * a["x "] + a_x

    one = torch.ones(2)
    _save(model, ({"x": one, "x ": one}, one))
    assert run(["export-triton", "net.pt", "-o", "models"]) == 0
    names = [port["name"] for port in _config("models/net")["input"]]
    assert names == ["a_x_0", "a_x_1", "a_x"]


def test_names_that_are_taken_twice() -> None:
    inputs = ({"b": torch.randn(2)}, torch.randn(2), torch.randn(2))
    frozen = _save(lambda a, a_b, a_b_0: (a["b"] - a_b) / a_b_0, inputs)
    write_repository(frozen, Path("models"), "net")
    assert [port["name"] for port in _config("models/net")["input"]] == ["a_b_1", "a_b", "a_b_0"]
    served = torch.jit.load("models/net/1/model.pt")
    assert torch.equal(served(inputs[0]["b"], *inputs[1:])[0], frozen(*inputs))


_X, _Y = torch.arange(4.0).reshape(2, 2), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda t: t[0] - t[2], ((_X, None, _Y),)),
        (lambda t: t[0] - t[2], ([_X, None, _Y],)),
        (lambda t: t[0] - t[2][1], ((_X, ("a", 1.5), (2, _Y, True)),)),
        (lambda flag, t: t * 2 if flag else t, (True, _X)),
        (lambda rate, t: t * rate, (float("inf"), _X)),
        (lambda rate, t: t * rate, (float("nan"), _X)),
        (lambda count, word, t: t["b"] * (count if word else 1), (3, "a'\"\n", {"b": _X})),
        (lambda nothing, t: t if nothing is None else nothing, (None, [_X])),
        (lambda t, e, d: t[0] * (2 + len(e) + len(d)), ([_X], [], {})),
    ],
)
def test_what_is_no_tensor_is_held_fast(model: Callable[..., Any], inputs: Any) -> None:
    frozen = _save(model, inputs)
    call = Call.bind(frozen, inputs)
    write_repository(frozen, Path("models"), "net", call=call)
    expected, _ = flatten(frozen(*inputs), "output")
    got = torch.jit.load("models/net/1/model.pt")(*call.tensors)
    got = [got] if isinstance(got, torch.Tensor) else list(got)
    pairs = zip(got, expected, strict=True)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def test_a_flag_before_a_tensor_on_the_command_line(folder: Path) -> None:
    def model(flag: bool, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if flag else x

    frozen = _save(model, (True, _X))
    Path("mine.py").write_text("import torch\nins = (True, torch.ones(2, 2))\n")
    args = ["export-triton", "net.pt", "-o", "models", "--inputs", "mine.py:ins"]
    assert run(args) == 0
    assert torch.equal(torch.jit.load("models/net/1/model.pt")(_X)[0], frozen(True, _X))


def test_inputs_given_in_another_order() -> None:
    frozen = _save(lambda a, b: a["x"] @ a["y"] - b, ({"x": _X, "y": _X}, _Y))
    call = Call.bind(frozen, {"b": _Y, "a": {"y": _X, "x": _X}})
    write_repository(frozen, Path("models"), "net", call=call)
    served = torch.jit.load("models/net/1/model.pt")
    assert torch.equal(served(_X, _Y, _Y)[0], frozen({"x": _X, "y": _Y}, _Y))


class Counter(nn.Module):
    """A buffer that each run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        self.count.add_(1)
        return x + self.count


@pytest.mark.parametrize(
    "model", [lambda x: x.add_(1) * 2, lambda x: x + torch.rand(2, 2), Counter().eval()]
)
@pytest.mark.parametrize("nested", [False, True])
def test_runs_leave_nothing_to_the_next(model: Callable[..., Any], nested: bool) -> None:
    inputs = (_X.clone(),)
    frozen = _save((lambda x: [model(x)]) if nested else model, inputs)
    call = Call.bind(frozen, inputs)
    write_repository(frozen, Path("models"), "net", call=call)
    assert torch.equal(inputs[0], _X)
    served = torch.jit.load("models/net/1/model.pt")
    for _ in range(3):
        torch.manual_seed(1)
        got = served(_X.clone())
        torch.manual_seed(1)
        expected, _ = flatten(frozen(_X.clone()), "output")
        assert torch.equal(got[0] if isinstance(got, tuple) else got, expected[0])


@pytest.mark.parametrize("real", [False, True])
def test_sizes_that_vary_are_free(real: bool) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ torch.ones(8, 4), x[:1]

    _save(model, torch.randn(3, 8), check_inputs=[torch.randn(5, 8)])
    given = ["--input", "3x8"] if real else []
    assert run(["export-triton", "net.pt", "-o", "models", *given]) == 0
    config = _config("models/net")
    assert config["input"][0]["dims"] == [-1, 8]
    assert [port["dims"] for port in config["output"]] == [[-1, 4], [1, 8]]


def test_batches() -> None:
    def model(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * weight.unsqueeze(-1), x.argmax(-1)

    _save(model, (torch.randn(3, 8), torch.randn(3)))
    assert run(["export-triton", "net.pt", "-o", "models", "--max-batch-size", "32"]) == 0
    config = _config("models/net")
    assert config["max_batch_size"] == 32
    none_left = {"dims": [1], "reshape": {"shape": []}}
    weight = {"name": "weight", "data_type": "TYPE_FP32", **none_left}
    assert config["input"] == [_port("x", "TYPE_FP32", 8), weight]
    assert config["output"][0]["dims"] == [8]
    assert config["output"][1].items() >= none_left.items()


def test_the_plan_that_the_server_runs() -> None:
    _save(_net(), torch.randn(3, 8))
    args = ["export-triton", "net.pt", "-o", "models", "--compute", "upcast"]
    assert run(args) == 0
    assert amp_script.load("models/net/1/model.pt").metadata.compute == "upcast"
    # A plan that is baked in is kept.
    assert run(["export-triton", "models/net/1/model.pt", "-o", "models"]) == 0
    assert amp_script.load("models/model/1/model.pt").metadata.compute == "upcast"


# --- what is refused ------------------------------------------------------------------------------

_ALONE = "depends on the other rows"
_NUMBER = "depends on how many rows are in its batch, or on its place"


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (lambda x: torch.log(x) - x.mean(0), torch.randn(4, 8), _ALONE),
        (lambda x: (x > x.mean(0)).long(), torch.randn(4, 8), _ALONE),
        (lambda x: x > x.mean(0), torch.randn(4, 8), _ALONE),
        (lambda x: x.argmax(0, keepdim=True).expand_as(x), torch.randn(4, 8), _ALONE),
        (lambda x: x.cumsum(0), torch.randn(4, 8), _ALONE),
        (lambda x: x * x.mean(), torch.randn(1), _ALONE),
        (lambda x: x / x.shape[0], torch.randn(4, 8), _NUMBER),
        (lambda x: x + torch.rand_like(x), torch.randn(4, 8), _NUMBER),
        (lambda x: torch.where(x.new_full((), x.shape[0]) > 1, x, x / 0), _X + 1, _NUMBER),
        (lambda x: x * float("nan"), torch.randn(4, 8), "holds no finite number"),
        (lambda x: x + 1, torch.ones(2, 1, dtype=torch.int64), "rows of the inputs are all alike"),
    ],
)
def test_rows_that_are_not_each_others_business(
    model: Callable[..., Any], inputs: torch.Tensor, message: str
) -> None:
    frozen = _save(model, inputs, check_inputs=[torch.cat([inputs, inputs])])
    call = Call.bind(frozen, inputs)
    with pytest.raises(ExportError, match=message):
        write_repository(frozen, Path("models"), "net", call=call, max_batch_size=4)


@pytest.mark.parametrize(
    "model",
    [
        lambda x: (x @ torch.ones(8, 50)).argmax(-1),
        lambda x: torch.log(x),
        lambda x: torch.where(x > 0, x, -torch.inf),
        lambda x: (x @ torch.ones(8, 3000) @ torch.ones(3000, 50)).softmax(-1),
    ],
)
def test_rows_that_stand_alone(model: Callable[..., Any]) -> None:
    frozen = _save(model, torch.randn(4, 8))
    write_repository(frozen, Path("models"), "net", max_batch_size=4)
    assert _config("models/net")["max_batch_size"] == 4


def test_what_is_empty() -> None:
    frozen = _save(lambda x: (x, x[:0]), _X)
    with pytest.raises(ExportError, match=r"output\[1\] is empty, .*\[0, 2\]; give inputs for"):
        write_repository(frozen, Path("models"), "net")
    frozen = _save(lambda x: x.sum(0), _X[:0])
    with pytest.raises(ExportError, match=r"input x is empty, .*\[0, 2\]; freeze the model with"):
        write_repository(frozen, Path("models"), "net")
    assert not Path("models").exists()


def _with_a_number(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x + 1, 5


@pytest.mark.parametrize(
    ("model", "options", "args", "message"),
    [
        (nn.Linear(8, 2), {"output_dtype": None}, [], "output is bfloat16, which Triton's PyTorch"),
        (nn.Linear(8, 2), {"output_dtype": None}, [], "--output-dtype float32"),
        (nn.Linear(8, 2), {"input_dtype": torch.bfloat16}, [], "input input is bfloat16"),
        (lambda x: x.sum(), {}, [], "output has no dimensions"),
        (lambda x: x.to(torch.complex64), {}, [], "output is complex64, which Triton's"),
        (_with_a_number, {}, [], "output[1] is 5, and the backend returns tensors alone"),
        (lambda x: x.sum(0), {}, ["--max-batch-size", "4"], "its first dimension is no batch"),
        (lambda x: x - x.mean(0), {}, ["--max-batch-size", "4"], "depends on the other rows"),
        (lambda x: x.view(3, 8), {}, ["--max-batch-size", "4"], "the program fails on its inputs"),
        (nn.Linear(8, 2), {}, ["--input", "3x9"], "cannot be multiplied"),
    ],
)
def test_programs_that_cannot_be_served(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    model: Callable[..., object],
    options: dict[str, Any],
    args: list[str],
    message: str,
) -> None:
    model = model.eval() if isinstance(model, nn.Module) else model
    _save(model, torch.randn(3, 8), **options)
    assert run(["export-triton", "net.pt", "-o", "models", *args]) == 1
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
    assert not list(folder.rglob("config.pbtxt"))


def test_a_name_and_inputs_that_no_server_takes() -> None:
    frozen = _save(lambda x, y: x @ y, (torch.randn(3, 8), torch.randn(8, 2)))
    with pytest.raises(ExportError, match="cannot be a model's name"):
        write_repository(frozen, Path("models"), "a b")
    with pytest.raises(ExportError, match=r"no batch .* x has 3, y has 8"):
        write_repository(frozen, Path("models"), "net", max_batch_size=4)
    assert not Path("models").exists()


def test_a_named_tuple_of_the_programs_own() -> None:
    frozen = _save(
        lambda batch: batch["a"] + batch["b"][0], ({"a": torch.ones(2), "b": [torch.ones(2)]},)
    )
    with pytest.raises(ExportError, match=r"input batch is a .*; freeze a function that takes its"):
        write_repository(frozen, Path("models"), "net")


def test_a_scripted_program(capsys: pytest.CaptureFixture[str]) -> None:
    amp_script.save(amp_script.script(_net()), "net.pt")
    assert run(["export-triton", "net.pt", "-o", "models"]) == 1
    assert "is a scripted program" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-o", "no/models"], "no folder no to make models in"),
        (["-o", "net.pt"], "net.pt is a file: expected a folder after -o"),
        (["-o", "models", "--compute", "packed"], "--compute packed: expected native or upcast"),
        (["-o", "models", "--input", "3x"], "input spec '3x', column 3"),
        (["-o", "models", "--name", "../up"], "--name: '../up' cannot be a model's name"),
        (["-o", "models", "--max-batch-size", "-1"], "Invalid value for '--max-batch-size'"),
    ],
)
def test_wrong_command_lines(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    _save(_net(), torch.randn(3, 8), verify=False)
    assert run(["export-triton", "net.pt", *args]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_an_existing_model_is_replaced_on_demand_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _save(_net(), torch.randn(3, 8), verify=False)
    args = ["export-triton", "net.pt", "-o", "models"]
    assert run(args) == 0
    before = (folder / "models/net/1/model.pt").read_bytes()
    _save(_net(), torch.randn(3, 8), verify=False)
    assert run(args) == 2
    assert "models/net exists: pass --force to replace it" in capsys.readouterr().err
    assert (folder / "models/net/1/model.pt").read_bytes() == before
    assert run([*args, "--force"]) == 0
    assert (folder / "models/net/1/model.pt").read_bytes() != before
    (folder / "models/net/2").mkdir()
    assert run([*args, "--force"]) == 1
    assert "models/net also holds 2, which would be deleted" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["save", "_put_in_place", "rename"])
def test_a_failure_while_writing_keeps_the_old_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, where: str
) -> None:
    _save(_net(), torch.randn(3, 8), verify=False)
    args = ["export-triton", "net.pt", "-o", "models", "--force"]
    assert run(args) == 0
    before = {path: path.stat() for path in folder.rglob("*")}

    def fail(*_: object) -> None:
        raise error

    if where == "rename":
        original = Path.rename

        def rename(self: Path, target: Path) -> Path:
            if self.parent.name.startswith(".net.") and self.name == "net":
                raise error
            return original(self, target)

        monkeypatch.setattr(Path, "rename", rename)
    else:
        monkeypatch.setattr(repository, where, fail)
    assert run(args) == (130 if isinstance(error, KeyboardInterrupt) else 1)
    after = {path: path.stat() for path in folder.rglob("*")}
    assert after.keys() == before.keys()
    file = folder / "models/net/1/model.pt"
    assert after[file].st_ino == before[file].st_ino
