"""TARGETs: both forms, what they may name, and whose fault an error is."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from amp_script.cli.targets import load_inputs, load_model
from amp_script.errors import AmpScriptError, UsageError

MODELS = """
    import torch

    net = torch.nn.Linear(2, 2)
    calls = []

    class Holder:
        inner = net

    def make(bias=True, *args, **kwargs):
        calls.append(bias)
        return torch.nn.Linear(2, 2, bias=bias)

    def needs(size, *, depth, bias=True):
        return net

    def broken():
        raise ValueError("no weights")

    def inputs():
        return torch.zeros(1), [torch.ones(2)]

    def forgets():
        make()

    def chooses():
        return Holder

    nothing = None
    tensor = torch.zeros(3)
    mapping = {"x": tensor}
    number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with modules in it; imports are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "nets.py").write_text("from models import net\n")
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "target",
    [
        "models.py:net",
        "./models.py:net",
        "models:net",
        "models.py:Holder.inner",
        "package.nets:net",
        "models.py:make",
        "models:make",
    ],
)
def test_names_a_module_or_a_function_that_returns_one(target: str) -> None:
    assert isinstance(load_model(target), torch.nn.Linear)


def test_a_class_that_needs_no_arguments_is_such_a_function(folder: Path) -> None:
    (folder / "classes.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def __init__(self): super().__init__()\n"
    )
    assert type(load_model("classes.py:Net")).__name__ == "Net"


def test_a_file_imports_its_neighbours_and_runs_once(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "near.py").write_text("size = 5\n")
    (folder / "sub" / "net.py").write_text(
        "import torch, near\nmade = torch.nn.Linear(near.size, 1)\n"
    )
    assert load_model("sub/net.py:made") is load_model("sub/net.py:made")


def test_a_file_does_not_hide_a_module_of_its_name(folder: Path) -> None:
    (folder / "textwrap.py").write_text("import torch\nnet = torch.nn.Linear(1, 1)\n")
    assert isinstance(load_model("textwrap.py:net"), torch.nn.Linear)
    assert sys.modules["textwrap"] is textwrap


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("models", "'models' names no attribute of a module: expected package.module:attribute or"),
        (":net", "':net' names no attribute"),
        ("models:", "'models:' names no attribute"),
        ("models.pt:net", "no module 'models.pt'"),
        ("mod-els:net", "'mod-els' is neither a module nor a .py file"),
        ("missing.py:net", "no file missing.py"),
        ("missing:net", "no module 'missing' in the current folder"),
        ("package.missing:net", "no module 'package.missing'"),
        ("missing.nets:net", "no module 'missing'"),
        ("models:nett", "models has no attribute 'nett'; did you mean net?"),
        ("models:Holder.outer", "models has no attribute 'Holder.outer'"),
        ("models:number", "models:number is an object of type int: expected an nn.Module, or a "),
        ("models:inputs", "models:inputs returned an object of type tuple: expected an nn.Module"),
        ("models:forgets", "models:forgets returned None: expected an nn.Module"),
        ("models:chooses", "models:chooses returned the class Holder: expected an nn.Module"),
        ("models:nothing", "models:nothing is None: expected an nn.Module"),
        ("models:needs", "models:needs needs arguments (size, depth): name a function that takes"),
    ],
)
def test_a_wrong_target_is_a_usage_error(target: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        load_model(target)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("", "models:broken", "calling models:broken failed: ValueError: no weights"),
        ("import absent", "bad:net", "importing bad failed: ModuleNotFoundError: No module"),
        ("import absent", "bad.py:net", "running bad.py failed: ModuleNotFoundError: No module"),
        ("1 +", "bad.py:net", "running bad.py failed: SyntaxError: invalid syntax"),
        ("raise SystemExit(3)", "bad.py:net", "running bad.py failed: SystemExit: 3"),
        ("raise SystemExit(3)", "bad:net", "importing bad failed: SystemExit: 3"),
    ],
)
def test_a_failure_of_the_users_code_is_no_usage_error(
    folder: Path, source: str, target: str, message: str
) -> None:
    (folder / "bad.py").write_text(source)
    with pytest.raises(AmpScriptError) as raised:
        load_model(target)
    assert not isinstance(raised.value, UsageError)
    assert str(raised.value).startswith(message)
    assert raised.value.__cause__ is not None
    assert "bad" not in sys.modules


def test_inputs_are_a_tensor_a_sequence_or_a_mapping() -> None:
    assert isinstance(load_inputs("models:tensor"), torch.Tensor)
    assert isinstance(load_inputs("models:inputs"), tuple)
    assert isinstance(load_inputs("models:mapping"), dict)
    with pytest.raises(
        UsageError, match="models:number is an object of type int: expected a tensor"
    ):
        load_inputs("models:number")
