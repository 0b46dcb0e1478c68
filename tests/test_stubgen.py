"""Stubs of compiled models: checkers take them, and every signature is the program's."""

import importlib.util
import inspect
import io
import itertools
import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, get_type_hints

import pytest
import torch
from checkers import mypy, pyright, unexpected
from stub_models import Hostile, Shadowing, Unsaveable, Zoo
from torch import nn
from torch.jit.annotations import try_ann_to_type

import amp_script
from amp_script.cli import app
from amp_script.errors import ArgumentError, StubMismatchError, StubsError, TracingWarning
from amp_script.stubgen import generate_stub
from amp_script.stubgen.annotations import Annotation
from amp_script.stubgen.conformance import check
from amp_script.stubgen.program import Method, Module, Parameter
from amp_script.stubgen.rendering import render
from amp_script.typing import TypedScriptModule

ROOT = Path(__file__).parents[1]


def _saved_and_loaded(module: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(module.save_to_buffer()))


def _silero() -> Path:
    """The TorchScript file in the package, which itself needs more than it declares."""
    found = importlib.util.find_spec("silero_vad")
    assert found
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0], "data", "silero_vad.jit")


def _minilm() -> torch.jit.ScriptModule:
    sys.path.insert(0, str(ROOT / "examples" / "demo"))
    import encoder

    sys.path.pop(0)
    model, inputs = encoder.sentence_encoder(), encoder.example_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracingWarning)  # no other sizes here
        return amp_script.trace_and_freeze(model, inputs, verify=False)


def _torch_modules() -> dict[str, nn.Module]:
    return {
        "rnn": nn.RNN(3, 4, num_layers=2, bidirectional=True),
        "lstm": nn.LSTM(3, 4),
        "gru": nn.GRU(3, 4, batch_first=True),
        "lstm_cell": nn.LSTMCell(3, 4),
        "attention": nn.MultiheadAttention(4, 2),
        "encoder_layer": nn.TransformerEncoderLayer(4, 2, 8),
        "sequential": nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1), nn.ReLU()),
        "module_list": nn.ModuleList([nn.Linear(1, 1), nn.Embedding(2, 3)]),
        "module_dict": nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Dropout()}),
    }


@pytest.fixture(scope="module")
def models() -> dict[str, torch.jit.ScriptModule]:
    zoo = torch.jit.script(Zoo())
    scripted = {name: torch.jit.script(module) for name, module in _torch_modules().items()}
    traced = torch.jit.trace(lambda *xs: xs[0] + xs[1], (torch.ones(1), torch.ones(1)))
    return {
        "zoo": zoo,
        "zoo_loaded": _saved_and_loaded(zoo),
        "unsaveable": torch.jit.script(Unsaveable()),
        "hostile": torch.jit.script(Hostile()),
        "shadowing": torch.jit.script(Shadowing()),
        "function": _saved_and_loaded(traced),
        "silero": torch.jit.load(_silero(), map_location="cpu"),
        "minilm": _minilm(),
        **scripted,
    }


@pytest.fixture(scope="module")
def stubs(
    models: dict[str, torch.jit.ScriptModule], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with a stub file and a module to import for each model."""
    folder = tmp_path_factory.mktemp("stubs")
    for name, model in models.items():
        folder.joinpath(f"stub_{name}.pyi").write_text(generate_stub(model, "Model"))
        text = generate_stub(model, "Model", importable=True)
        folder.joinpath(f"module_{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def described(
    models: dict[str, torch.jit.ScriptModule], stubs: Path
) -> dict[str, tuple[torch.jit.ScriptModule, ModuleType]]:
    """Each model with its imported stub."""
    imported = {}
    for name, model in models.items():
        spec = importlib.util.spec_from_file_location(f"module_{name}", stubs / f"module_{name}.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        imported[name] = (model, module)
    return imported


USE = """
import torch
from torch import Tensor
from typing_extensions import assert_type
from stub_zoo import Color, Model, Shape, Word  # E: pyright[reportMissingModuleSource]

def use(model: Model, x: Tensor) -> None:
    assert_type(model(x, 2, pair=(1, 1.0)), tuple[Tensor, int | None])
    assert_type(model.make(x, "a"), Shape)
    assert_type(model.make(x, "a").corner.y, int | None)
    assert_type(model.pick(Color.RED, Word.NO, torch.device("cpu")), Color)
    assert_type(model.by_name.one.weight, Tensor)
    assert_type(model.later(x).wait(), Tensor)
    assert_type(model.eval(), Model)
    scripted: torch.jit.ScriptModule = model
    model(x, "2")  # E: mypy[arg-type] pyright[reportArgumentType]
    model.by_keyword(1, ())  # E: mypy[call-arg] pyright[reportCallIssue]
"""


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checkers_accept_every_stub_and_know_what_is_in_it(checker: Any, stubs: Path) -> None:
    stubs.joinpath("use.py").write_text(USE)
    assert unexpected(checker, sorted(stubs.glob("*.py*")), path=[stubs]) == []


# --- compared with the schemas, by torch's own reading of Python annotations ----------------------


def _parts(model: torch.jit.ScriptModule, stub: type) -> Iterator[tuple[Any, type]]:
    """A module and every submodule that the stub names, with its class."""
    yield model, stub
    hints = get_type_hints(stub, localns=vars(stub))
    noted = dict(re.findall(r"^    # '(.*)': (\w+), reached", _source(stub), re.MULTILINE))
    for name, child in model.named_children():
        yield from _parts(child, hints[name] if name in hints else vars(stub)[noted[name]])


def _source(stub: type) -> str:
    return textwrap.dedent(inspect.getsource(stub))


def _torchscript(hint: Any) -> str:
    """A Python annotation as TorchScript writes it, names of the program's types shortened."""
    if isinstance(hint, type) and hint.__module__.startswith("module_"):
        return hint.__name__
    origin, arguments = getattr(hint, "__origin__", None), getattr(hint, "__args__", ())
    if origin in (list, dict) or origin is torch.futures.Future:
        inside = ", ".join(map(_torchscript, arguments))
        return f"{origin.__name__.capitalize()}[{inside}]"
    if origin is tuple:
        return f"Tuple[{', '.join(map(_torchscript, arguments)) or '()'}]"
    if arguments:
        return "Union[" + ", ".join(sorted(map(_torchscript, arguments))) + "]"
    if hint is Any:
        return "Any"
    kind = try_ann_to_type(hint, None)
    assert kind is not None, hint
    return str(kind.annotation_str)


def _shown(annotation: str) -> str:
    """A schema's type in the form of :func:`_torchscript`."""
    import ast

    def show(node: ast.expr) -> str:
        if isinstance(node, ast.Subscript):
            inside = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            parts = [show(part) for part in inside]
            name = ast.unparse(node.value)
            if name == "Optional":
                name, parts = "Union", [*parts, "NoneType"]
            if name == "Union":
                flat = [part for each in parts for part in _flattened(each)]
                return "Union[" + ", ".join(sorted(flat)) + "]"
            return f"{name}[{', '.join(parts) or '()'}]"
        text = ast.unparse(node)
        if text == "number":
            return "Union[complex, float, int]"
        return text.rpartition(".")[2] if text.startswith("__torch__") else text

    return show(ast.parse(annotation, mode="eval").body)


def _flattened(union: str) -> list[str]:
    inside = union.removeprefix("Union[").removesuffix("]")
    return inside.split(", ") if union.startswith("Union[") else [union]


def _renamed(stub_module: ModuleType) -> dict[str, str]:
    """Names of the program's types that the stub had to change."""
    source = inspect.getsource(stub_module).splitlines()
    return {
        line.split("class ")[1].split("(")[0].rstrip(":"): note.rpartition(".")[2]
        for line, note in itertools.pairwise(source)
        if note.strip().startswith("# In the program: ")
    }


def _declared(model: torch.jit.ScriptModule, names: type) -> Iterator[tuple[str, Any]]:
    for name in model._c._method_names():
        if not name.startswith("__"):
            yield name, model._c._get_method(name).schema
            if name == "forward":
                yield "__call__", model._c._get_method(name).schema


NAMES = [
    *("zoo", "zoo_loaded", "unsaveable", "hostile", "shadowing", "function", "silero", "minilm"),
    *_torch_modules(),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_signature_is_the_schemas(
    name: str, described: dict[str, tuple[torch.jit.ScriptModule, ModuleType]]
) -> None:
    whole, stub_module = described[name]
    renamed = _renamed(stub_module)
    compared = 0
    for model, stub in _parts(whole, stub_module.Model):
        for method, schema in _declared(model, stub):
            function = vars(stub)[method]
            hints = get_type_hints(function, localns=vars(stub))
            ours = list(inspect.signature(function).parameters.values())[1:]
            assert [each.name for each in ours] == [each.name for each in schema.arguments[1:]]
            for parameter, argument in zip(ours, schema.arguments[1:], strict=True):
                _compare(parameter, argument, hints[parameter.name], renamed)
                compared += 1
            (result,) = schema.returns
            assert _spelled(hints["return"], renamed) == _shown(result.type.annotation_str)
    assert compared


def _spelled(hint: Any, renamed: dict[str, str]) -> str:
    text = _torchscript(hint)
    for ours, theirs in renamed.items():
        text = text.replace(ours, theirs)
    return text


def _compare(
    parameter: inspect.Parameter, argument: Any, hint: Any, renamed: dict[str, str]
) -> None:
    assert _spelled(hint, renamed) == _shown(argument.type.annotation_str)
    has_default = parameter.default is not inspect.Parameter.empty
    assert has_default == argument.has_default_value()
    if has_default and parameter.default is not ...:
        assert parameter.default == argument.default_value
    assert (parameter.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only


@pytest.mark.parametrize("name", NAMES)
def test_every_member_is_declared(
    name: str, described: dict[str, tuple[torch.jit.ScriptModule, ModuleType]]
) -> None:
    whole, stub_module = described[name]
    for model, stub in _parts(whole, stub_module.Model):
        hints = get_type_hints(stub, localns=vars(stub))
        tensors = {name for name, _ in model.named_parameters(recurse=False)}
        tensors |= {name for name, _ in model.named_buffers(recurse=False)}
        assert tensors <= hints.keys()
        assert {name for name, _ in model.named_children() if name.isidentifier()} <= hints.keys()
        for constant, value in vars(stub).items():
            if constant in hints and not callable(value):
                assert getattr(model, constant) == value


def test_the_text_of_a_small_stub() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return x * self.factor * times

    assert generate_stub(torch.jit.script(Scale()), "Scale") == (
        '"""Types of the TorchScript module Scale, written by amp-script."""\n'
        "\n"
        "import torch\n"
        "from torch import Tensor\n"
        "\n"
        "class Scale(torch.jit.ScriptModule):\n"
        '    """TorchScript module Scale."""\n'
        "\n"
        "    # Parameters\n"
        "    factor: Tensor\n"
        "\n"
        "    def forward(self, x: Tensor, times: int = 1) -> Tensor: ...\n"
        "    def __call__(self, x: Tensor, times: int = 1) -> Tensor: ...\n"
    )


def test_an_artifact_brings_dtypes_and_shapes(models: dict[str, torch.jit.ScriptModule]) -> None:
    text = generate_stub(models["minilm"], "Encoder")
    assert "frozen in bfloat16 for cpu" in text
    assert "input_ids: int64 of shape (8, " in text


class Unholdable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running-mean", torch.ones(1))
        self.by_name = nn.ModuleDict({"class": nn.Linear(1, 1), "a-b": nn.ReLU()})
        self.weights = nn.ParameterList([torch.ones(1), torch.ones(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x * weight
        return x


def test_names_that_python_cannot_hold_are_noted() -> None:
    text = generate_stub(torch.jit.script(Unholdable()), "Model")
    assert "# 'running-mean': Tensor, reached by getattr(module, 'running-mean')" in text
    assert "# 'class': Class, reached by getattr(module, 'class')" in text
    assert "# 'a-b': AB, reached by getattr(module, 'a-b')" in text
    assert "class AB(torch.jit.ScriptModule)" in text
    assert "# '1': Tensor, reached by getattr(module, '1')" in text


def test_a_parameter_that_python_cannot_hold_becomes_positional() -> None:
    tensor = Annotation("Tensor")
    parameters = tuple(Parameter(name, tensor) for name in ("x", "class", "y"))
    module = Module("Net", (), (), (), (), (Method("forward", parameters, tensor),), ())
    text = render(module, {}, "Net")
    assert "def forward(self, x: Tensor, class_: Tensor, /, y: Tensor) -> Tensor: ..." in text


class Plain(nn.Module):
    rate: Final[float]

    def __init__(self) -> None:
        super().__init__()
        self.rate = float("inf")
        self.layer = nn.Linear(1, 1)

    def forward(
        self,
        x: torch.Tensor,
        n: int = 1,
        f: float = float("nan"),
        s: str = "",
        default: torch.Tensor = torch.ones(1),  # noqa: B008
    ) -> dict[str, bool]:
        return {s: True}


WRITTEN_WITH = [
    *("Any", "Final", "NotImplementedError", "Tensor", "_default", "annotations", "bool"),
    *("builtins", "dict", "float", "int", "self", "str", "torch", "typing"),
]


@pytest.fixture(scope="module")
def named_as_the_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stub and a module whose class has each name that they are written with."""
    folder = tmp_path_factory.mktemp("named")
    model = torch.jit.script(Plain())
    for name in WRITTEN_WITH:
        folder.joinpath(f"stub_{name}.pyi").write_text(generate_stub(model, name))
        text = generate_stub(model, name, importable=True)
        folder.joinpath(f"module_of_{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checkers_accept_a_class_named_as_the_text(checker: Any, named_as_the_text: Path) -> None:
    files = sorted(named_as_the_text.glob("*.py*"))
    assert len(files) == 2 * len(WRITTEN_WITH)
    assert unexpected(checker, files, path=[named_as_the_text]) == []


@pytest.mark.parametrize("name", WRITTEN_WITH)
def test_a_class_named_as_the_text_is_imported(
    name: str, named_as_the_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(named_as_the_text)
    module = importlib.import_module(f"module_of_{name}")
    check(torch.jit.script(Plain()), getattr(module, name))


def test_parameters_that_python_would_hold_twice() -> None:
    tensor = Annotation("Tensor")
    parameters = tuple(Parameter(name, tensor) for name in ("self", "x.1", "x_1"))
    module = Module("Net", (), (), (), (), (Method("forward", parameters, tensor),), ())
    text = render(module, {}, "Net")
    assert "(_self, self: Tensor, x_12: Tensor, /, x_1: Tensor) -> Tensor: ..." in text


def test_an_input_whose_name_would_end_the_docstring() -> None:
    key = 'a"""\'b'
    frozen = amp_script.trace_and_freeze(
        lambda batch: batch[key] + 1, ({key: torch.ones(1)},), verify=False
    )
    namespace: dict[str, Any] = {"__name__": "net"}
    exec(generate_stub(frozen, "Net", importable=True), namespace)
    assert f"batch[{key!r}]: float32" in namespace["Net"].forward.__doc__


@pytest.mark.parametrize("name", ["class", "two words", "", "1st"])
def test_a_class_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(StubsError, match="no name for a class"):
        generate_stub(torch.jit.script(nn.ReLU()), name)


def test_what_is_no_script_module_is_refused() -> None:
    with pytest.raises(StubsError, match="this is a ReLU"):
        generate_stub(nn.ReLU(), "Model")  # type: ignore[arg-type]


# --- a module compared with a stub class ----------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_what_its_stub_says(
    name: str, described: dict[str, tuple[torch.jit.ScriptModule, ModuleType]]
) -> None:
    model, stub_module = described[name]
    check(model, stub_module.Model)


class Takes(TypedScriptModule[[torch.Tensor], torch.Tensor]): ...


class TakesAnything(TypedScriptModule[..., torch.Tensor]): ...


class TakesTwo(TypedScriptModule[[torch.Tensor, int], torch.Tensor]): ...


class GivesPair(TypedScriptModule[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]): ...


class Renames(torch.jit.ScriptModule):
    def forward(self, y: torch.Tensor) -> torch.Tensor: ...  # type: ignore[empty-body]


class Promises(torch.jit.ScriptModule):
    weight: torch.Tensor
    bias: int
    in_features: int = 3
    missing: torch.Tensor

    def score(self) -> float: ...  # type: ignore[empty-body]


class Nested(torch.jit.ScriptModule):
    torch: Promises


class PromisesByOtherMeans(torch.jit.ScriptModule):
    out_features = 3
    slope = 2.0

    @property
    def in_features(self) -> str: ...  # type: ignore[empty-body]

    @property
    def shape(self) -> int: ...  # type: ignore[empty-body]

    @staticmethod
    def forward(x: int) -> torch.Tensor: ...  # type: ignore[empty-body]

    @classmethod
    def make(cls) -> torch.Tensor: ...  # type: ignore[empty-body]


class LooksFromAfar(torch.jit.ScriptModule):
    bias: ClassVar[torch.Tensor]
    out_features = 1

    class Inside: ...

    @property
    def in_features(self) -> float: ...  # type: ignore[empty-body]

    @staticmethod
    def forward(input: torch.Tensor) -> torch.Tensor: ...  # type: ignore[empty-body]


class KeepsItsClass(torch.jit.ScriptModule):
    Hostile: nn.ReLU
    Any: nn.Module
    Runs: Any


class NamesNothing(torch.jit.ScriptModule):
    weight: "Undefined"  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("like", "expected"),
    [
        (TakesTwo, ["forward: the program has no parameter '_1'"]),
        (GivesPair, ["forward: gives Tensor, not tuple[torch.Tensor, torch.Tensor]"]),
        (Renames, ["forward: parameter 1 is 'input', not 'y'"]),
        (
            Promises,
            [
                "score: the program has no such method",
                "bias: is Tensor, not int",
                "in_features: is 1, not 3",
                "missing: the program has no such attribute",
            ],
        ),
        (
            PromisesByOtherMeans,
            [
                "out_features: is 1, not 3",
                "slope: the program has no such attribute",
                "in_features: is int, not str",
                "shape: the program has no such attribute",
                "forward: parameter 1 is 'input', not 'x'",
                "make: the program has no such method",
            ],
        ),
    ],
)
def test_every_difference_is_named(like: type, expected: list[str]) -> None:
    with pytest.raises(StubMismatchError) as raised:
        check(torch.jit.script(nn.Linear(1, 1)), like)
    assert list(raised.value.differences) == expected
    assert f"Linear is not what {like.__name__} says" in str(raised.value)


@pytest.mark.parametrize("like", [Takes, TakesAnything, LooksFromAfar])
def test_a_signature_may_say_less(like: type) -> None:
    check(torch.jit.script(nn.Linear(1, 1)), like)


def test_submodules_are_compared_too() -> None:
    with pytest.raises(StubMismatchError) as raised:
        check(torch.jit.script(Hostile()), Nested)
    assert "torch.score: the program has no such method" in raised.value.differences
    with pytest.raises(StubMismatchError) as raised:
        check(torch.jit.script(Hostile()), KeepsItsClass)
    assert list(raised.value.differences) == ["Hostile: a submodule, not ReLU"]


@pytest.mark.parametrize(
    "like", [0, int, nn.Linear, list[int], TypedScriptModule[[torch.Tensor], torch.Tensor]]
)
def test_what_describes_no_module_is_refused(like: Any, tmp_path: Path) -> None:
    amp_script.save(amp_script.script(nn.Linear(1, 1)), tmp_path / "net.pt")
    with pytest.raises(
        ArgumentError, match=r"like is .*: expected a subclass of torch\.jit\.Script"
    ):
        amp_script.load(tmp_path / "net.pt", like=like)


def test_annotations_that_name_nothing() -> None:
    with pytest.raises(ArgumentError, match=r"NamesNothing: .* name 'Undefined' is not def"):
        check(torch.jit.script(nn.Linear(1, 1)), NamesNothing)


def test_a_description_is_no_module() -> None:
    with pytest.raises(TypeError, match="describes a script module"):
        Takes()
    scripted = torch.jit.script(nn.ReLU())
    assert isinstance(scripted, TypedScriptModule)
    assert not isinstance(scripted, Takes)
    assert not isinstance(nn.ReLU(), TypedScriptModule)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".py", ".pyi"])
def test_the_command_writes_a_stub(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"silero{suffix}"
    assert app.run(["stubgen", str(_silero()), "-o", str(file)]) == 0
    assert capsys.readouterr().out.strip() == str(file)
    text = file.read_text()
    assert "class VADRNNJITMerge(torch.jit.ScriptModule)" in text
    assert ("raise NotImplementedError" in text) == (suffix == ".py")


def test_the_command_names_the_class(tmp_path: Path) -> None:
    model, file = tmp_path / "my-model.pt", tmp_path / "model.pyi"
    torch.jit.trace(lambda x: x + 1, torch.ones(1)).save(str(model))
    assert app.run(["stubgen", str(model), "-o", str(file)]) == 0
    assert "class MyModel(" in file.read_text()
    assert app.run(["stubgen", str(model), "-o", str(file), "--class", "Other", "--force"]) == 0
    assert "class Other(" in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["absent.pt", "-o", "a.pyi"], 1, "absent.pt: no such file"),
        (["broken.pt", "-o", "a.pyi"], 1, "broken.pt: no TorchScript archive"),
        (["broken.pt", "-o", "a.txt"], 2, "ends in .pyi or .py"),
        (["broken.pt", "-o", "taken.pyi"], 2, "exists"),
        (["broken.pt", "-o", "a.pyi", "--class", "a b"], 2, "--class 'a b': expected a name"),
        (["broken.pt", "-o", "a.pyi", "--class", ""], 2, "--class '': expected a name"),
    ],
)
def test_the_command_refuses(
    arguments: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.pt").write_bytes(b"no archive")
    Path("taken.pyi").touch()
    assert app.run(["stubgen", *arguments]) == code
    assert said in capsys.readouterr().err
    assert not Path("a.pyi").exists()
