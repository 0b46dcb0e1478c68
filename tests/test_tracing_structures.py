"""Nested inputs and outputs, through tracing, saving and loading."""

from __future__ import annotations

import dataclasses
import enum
import math
import threading
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import amp_script
from amp_script.errors import InputError, StructureError, TracingError
from amp_script.structure import flatten, map_tensors, named_leaves, unflatten


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor | None = None
    extra: tuple[torch.Tensor, ...] = ()


@dataclasses.dataclass
class Hidden:
    ids: torch.Tensor
    _mask: int = 3


def rand() -> torch.Tensor:
    return torch.rand(3, 4)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(
        self,
        pair: Pair,
        named: dict[str, torch.Tensor],
        several: list[Any],
        scale: int = 2,
        *,
        mixed: dict[str, Any],
        batch: Batch,
        flag: bool = True,
    ) -> Any:
        y = self.layer(pair.left) * scale + named["k"] + several[1][0]
        if flag:
            y = y + batch.ids
        return (
            Batch(y, None, (y * 2, mixed["q"])),
            Pair(y, pair.right),
            {"number": 1, "text": "hi", "list": [y, y]},
            {"one": y, "other": y * 3},
            torch.max(y, 1),
        )


def nested_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    args = (Pair(rand(), rand()), {"k": rand()}, [rand(), (rand(),)])
    kwargs = {"mixed": {"q": rand(), "r": (rand(), 3)}, "batch": Batch(rand(), None, (rand(),))}
    return args, kwargs


def eager(model: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        return model(*args, **kwargs)


def assert_same(got: object, want: object) -> None:
    pairs = dict(named_leaves("output", got)), dict(named_leaves("output", want))
    assert pairs[0].keys() == pairs[1].keys()
    for path, value in pairs[1].items():
        if isinstance(value, torch.Tensor):
            found = pairs[0][path]
            assert isinstance(found, torch.Tensor)
            assert found.dtype == value.dtype
            assert torch.equal(found, value)
        else:
            assert pairs[0][path] == value


def test_nested_arguments_and_results_also_from_a_file(tmp_path: Path) -> None:
    model = Nested().eval()
    args, kwargs = nested_arguments()
    frozen = amp_script.trace_and_freeze(model, args, example_kwargs=kwargs, compute="native")
    amp_script.save(frozen, tmp_path / "nested.pt")
    loaded = amp_script.load(tmp_path / "nested.pt", compute="native")
    for program in (frozen, loaded):
        args, kwargs = nested_arguments()
        result = program(*args, **kwargs)
        assert_same(result, eager(model, args, kwargs))
        assert isinstance(result[0], dict)
        assert result[1]._fields == Pair._fields
        assert result[2]["text"] == "hi"
        assert result[4]._fields == ("values", "indices")
    by_name = dict(zip(("pair", "named", "several"), args, strict=True), **kwargs)
    assert_same(frozen(**by_name), eager(model, args, kwargs))


def test_plain_torch_gets_dictionaries_where_torchscript_has_them(tmp_path: Path) -> None:
    def model(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"product": batch["a"] @ batch["b"].t(), "sum": batch["a"] + batch["b"]}

    batch = {"a": rand(), "b": rand()}
    frozen = amp_script.trace_and_freeze(model, (batch,), compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = torch.jit.load(tmp_path / "model.pt")
    assert_same(loaded(batch), eager(model, (batch,), {}))


def test_mappings_are_keyword_arguments() -> None:
    def model(ids: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        return ids @ mask.t()

    a, b = rand(), rand()
    for inputs in ({"ids": a, "mask": b}, OrderedDict(mask=b, ids=a), UserDict(ids=a, mask=b)):
        frozen = amp_script.trace_and_freeze(model, inputs, compute="native")
        assert_same(frozen(ids=a, mask=b), eager(model, (a,), {"mask": b}))


def test_values_that_are_no_tensors_are_held_fast() -> None:
    args, kwargs = nested_arguments()
    frozen = amp_script.trace_and_freeze(
        Nested().eval(), (*args, 5), example_kwargs={**kwargs, "flag": False}, compute="native"
    )
    want = frozen(*args, 5, **kwargs)  # what was held fast is the default, where none follows
    assert_same(frozen(*args, 5, flag=False, **kwargs), want)
    with pytest.raises(torch.jit.Error, match="scale was 5 when the program was traced"):
        frozen(*args, 2, **kwargs)
    with pytest.raises(torch.jit.Error, match="flag was False when the program was traced"):
        frozen(*args, 5, flag=True, **kwargs)
    kwargs["batch"] = dataclasses.replace(kwargs["batch"], mask=rand())
    with pytest.raises(torch.jit.Error, match=r"batch\['mask'\] was None when"):
        frozen(*args, 5, **kwargs)


def test_wrong_parts_are_named() -> None:
    args, kwargs = nested_arguments()
    frozen = amp_script.trace_and_freeze(
        Nested().eval(), args, example_kwargs=kwargs, compute="native"
    )
    names = [spec.name for spec in frozen.metadata.inputs]
    assert names[:5] == ["pair.left", "pair.right", "named['k']", "several[0]", "several[1][0]"]
    kwargs["mixed"]["q"] = rand().half()
    with pytest.raises(InputError, match=r"mixed\['q'\]: expected float32 .*given float16"):
        frozen(*args, **kwargs)


def test_the_same_tensor_twice_is_two_inputs() -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b.t()

    x, y = rand(), rand()
    frozen = amp_script.trace_and_freeze(model, (x, x), compute="native")
    assert_same(frozen(x, y), eager(model, (x, y), {}))


def test_variable_positional_arguments() -> None:
    def model(first: torch.Tensor, *rest: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return first @ rest[0].t() + rest[1] @ named["last"].t()

    tensors = [rand() for _ in range(4)]
    frozen = amp_script.trace_and_freeze(
        model, tensors[:3], example_kwargs={"last": tensors[3]}, compute="native"
    )
    want = eager(model, tensors[:3], {"last": tensors[3]})
    assert_same(frozen(*tensors[:3], last=tensors[3]), want)


def test_flatten_and_unflatten_are_inverse() -> None:
    value = {"a": [rand(), (rand(), None)], "b": Pair(rand(), rand()), "c": Batch(rand())}
    tensors, structure = flatten(value, "value")
    rebuilt = unflatten(structure, iter(tensors))
    assert_same(rebuilt, value)
    assert isinstance(rebuilt, dict)
    assert isinstance(rebuilt["b"], Pair)
    assert isinstance(rebuilt["c"], Batch)


class Store(MutableMapping[str, Any]):
    """Keeps its items in an attribute, and holds other things."""

    def __init__(self, **items: Any) -> None:
        self.items_of_mine = {"items": dict(items)}
        self.layer = nn.Linear(2, 2)
        self.scale = (self.layer.weight * 2).sum()

    def __getitem__(self, key: str) -> Any:
        return self.items_of_mine["items"][key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of_mine["items"][key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of_mine["items"][key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_mine["items"])

    def __len__(self) -> int:
        return len(self.items_of_mine["items"])


class Tagged(list[Any]):
    """A list that holds another thing."""

    def __init__(self, tag: object, items: list[Any]) -> None:
        super().__init__(items)
        self.tag = tag


@dataclasses.dataclass(frozen=True)
class Fixed:
    a: torch.Tensor
    tag: object = None


@pytest.mark.parametrize(
    "make",
    [
        dict,
        OrderedDict,
        lambda **items: defaultdict(list, items),
        UserDict,
        lambda **items: ChainMap({}, items),
        Store,
        Fixed,
        lambda a: Tagged(object(), [a]),
    ],
)
def test_a_container_with_other_tensors_leaves_the_callers_as_it_is(
    make: Callable[..., Any],
) -> None:
    tensor = rand()
    value = make(a=tensor)
    changed: Any = map_tensors(value, torch.neg, "value")
    assert type(changed) is type(value)
    for kept, expected in ((value, tensor), (changed, -tensor)):
        assert torch.equal(flatten(kept, "value")[0][0], expected)
    assert flatten(value, "value")[0][0] is tensor
    for name in ("tag", "layer", "scale", "default_factory"):
        assert getattr(changed, name, None) is getattr(value, name, None)


def test_nothing_that_runs_a_model_changes_the_callers_mapping() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch: Store) -> torch.Tensor:
            result: torch.Tensor = self.layer(batch["a"])
            return result

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept, self.layer = Kept(), nn.Linear(4, 4)

        def forward(self, batch: Store) -> Any:
            lower = Store(a=self.layer(batch["a"]))
            return self.kept(lower), lower["a"]

    model, tensor = Outer().eval(), rand()
    batch = Store(a=tensor)
    frozen = amp_script.trace_and_freeze(model, (batch,), compute="native", keep_float32=["kept"])
    amp_script.compare_layers(model, (batch,))
    assert batch["a"] is tensor
    with amp_script.keep_float32(model, "kept"):
        want = eager(model, (batch,), {})
    assert want[1].dtype is torch.bfloat16
    assert_same(frozen({"a": tensor}), want)


class Locked(Store):
    """Cannot be copied."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.lock = threading.Lock()


@pytest.mark.parametrize("make", [Locked, lambda **items: MappingProxyType(items)])
def test_an_object_of_which_no_copy_can_be_made_is_refused(make: Callable[..., Any]) -> None:
    def model(batch: Any) -> torch.Tensor:
        result: torch.Tensor = batch["a"] @ batch["a"].t()
        return result

    with pytest.raises(StructureError, match=r"^batch is a .*: no copy of it .*TypeError.*pass a"):
        amp_script.trace_and_freeze(model, (make(a=rand()),))
    x = rand()
    frozen = amp_script.trace_and_freeze(lambda x: make(a=x @ x.t()), x, compute="native")
    assert_same(frozen(x), eager(lambda x: {"a": x @ x.t()}, (x,), {}))


def test_what_contains_itself_or_is_nested_too_deep_is_refused() -> None:
    around_itself: list[Any] = [rand()]
    around_itself.append({"a": around_itself})
    deep: Any = rand()
    for _ in range(1200):
        deep = [deep]
    for value, message in (
        (around_itself, r"^(value|output)\[1\]\['a'\] is a builtins.list: it contains itself"),
        (deep, "more than 100 levels deep"),
    ):
        with pytest.raises(StructureError, match=message):
            amp_script.trace_and_freeze(lambda x, value: x, (rand(), value))
        with pytest.raises(StructureError, match=message):
            amp_script.trace_and_freeze(lambda x: value, rand())  # noqa: B023  # called here
        with pytest.raises(StructureError, match=message):
            map_tensors(value, torch.neg, "value")


@pytest.mark.parametrize("kind", ["tuple", "list", "dict"])
def test_nesting_that_is_not_too_deep(kind: str) -> None:
    wrap: Callable[[Any], Any] = {
        "tuple": lambda x: (x, 1),
        "list": lambda x: [x],
        "dict": lambda x: {"a": x},
    }[kind]

    def model(x: torch.Tensor) -> Any:
        result: Any = x @ x.t()
        for _ in range(100):
            result = wrap(result)
        return result

    x = rand()
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    assert_same(frozen(x), eager(model, (x,), {}))


def test_empty_containers_keep_their_kind() -> None:
    frozen = amp_script.trace_and_freeze(
        lambda x, a, b: (x @ x.t(), a, b, {"inside": [b]}), (rand(), [], {}), compute="native"
    )
    assert frozen(rand(), [], {})[1:] == ([], {}, {"inside": [{}]})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -(1 << 63)])
def test_numbers_without_a_literal(value: float) -> None:
    def model(x: torch.Tensor, number: float) -> Any:
        return x @ x.t(), number

    frozen = amp_script.trace_and_freeze(model, (rand(), value), compute="native")
    assert str(frozen(rand(), value)[1]) == str(value)
    assert str(frozen(rand())[1]) == str(value)
    with pytest.raises(torch.jit.Error, match="when the program was traced"):
        frozen(rand(), type(value)(1))


def test_numbers_and_names_that_torchscript_lacks_are_refused() -> None:
    with pytest.raises(StructureError, match=r"output\[1\] .* at most 64 bits"):
        amp_script.trace_and_freeze(lambda x: (x, 1 << 63), rand())
    for name in ("self", "torch", "two words", "lambda", "é", "NoneType", "str", "range", "ops"):
        with pytest.raises(TracingError, match=f"cannot be called '{name}'"):
            amp_script.trace_and_freeze(lambda **named: [*named.values()], {name: rand()})
    for mixed in ({"_a": 1}, {"é": 1}, {"two words": 1}, {"NoneType": 1}):
        with pytest.raises(StructureError, match=r"^output is a builtins\.dict: .* field called '"):
            amp_script.trace_and_freeze(lambda x: {"x": x, **mixed}, rand())  # noqa: B023  # called here
    with pytest.raises(StructureError, match=r"Hidden: .* field called '_mask'"):
        amp_script.trace_and_freeze(lambda x: Hidden(x), rand())


@pytest.mark.parametrize(
    "name", ["len", "list", "max", "input", "type", "Tensor", "device", "wait"]
)
def test_arguments_with_names_of_other_things(name: str, tmp_path: Path) -> None:
    def model(**named: dict[str, Any]) -> Any:
        x: torch.Tensor = named[name]["a"]
        return x @ x.t(), x.shape[0], math.inf, []

    inputs = {name: {"a": rand(), "b": rand()}}
    frozen = amp_script.trace_and_freeze(model, inputs, compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = amp_script.load(tmp_path / "model.pt", compute="native")
    for program in (frozen, loaded):
        assert_same(program(**inputs), eager(model, (), inputs))


TEXTS = ["", "\x00", "\x7f\x1b[0m", "\u2028", "\\", "'\"", "a\n\tb", "é🎉", "{x} %s", "\\x00"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_is_a_key_or_a_value(text: str, tmp_path: Path) -> None:
    def model(batch: dict[str, torch.Tensor], word: str) -> Any:
        return {text: batch[text] @ batch[text].t()}, word, text

    args = {text: rand()}, text
    frozen = amp_script.trace_and_freeze(model, args, compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = amp_script.load(tmp_path / "model.pt", compute="native")
    for program in (frozen, loaded):
        assert_same(program(*args), eager(model, args, {}))
        with pytest.raises(torch.jit.Error, match=r"word was .* when the program was traced"):
            program(args[0], text + ".")


@pytest.mark.parametrize("text", ["\ud800", "a\r\n"])
def test_text_that_torchscript_loses_is_refused(text: str) -> None:
    message = r"is a builtins\.str: TorchScript cannot write '\\(ud800|r)' into a file"
    with pytest.raises(StructureError, match=r"^output\[1\] " + message):
        amp_script.trace_and_freeze(lambda x: (x, text), rand())
    with pytest.raises(StructureError, match=message):
        amp_script.trace_and_freeze(lambda batch: batch[text], ({text: rand()},))


class Size(enum.IntEnum):
    SMALL = 3


class Word(str, enum.Enum):
    YES = "yes"
    NO = "no"


def test_values_and_keys_of_classes_of_their_own(tmp_path: Path) -> None:
    class Real(float):
        """As numpy's."""

    def model(batch: dict[str, Any], size: Size, word: Word, number: Real) -> Any:
        assert size is Size.SMALL
        assert word is Word.YES
        assert isinstance(number, Real)
        x = batch[Word.YES]
        return x @ x.t() * number, size, {Word.NO: x, Word.YES: word}, [Real("nan")]

    args = ({Word.YES: rand(), Word.NO: 1}, Size.SMALL, Word.YES, Real(2.5))
    frozen = amp_script.trace_and_freeze(model, args, compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = amp_script.load(tmp_path / "model.pt", compute="native")
    plain = ({"yes": args[0][Word.YES], "no": 1}, 3, "yes", 2.5)
    want = eager(model, args, {})
    for program in (frozen, loaded):
        for given in (args, plain):
            result = program(*given)
            assert_same(result[:3], want[:3])
            assert [type(part) for part in result[1:3]] == [int, dict]
            assert type(result[2]["yes"]) is str
            assert math.isnan(result[3][0])
        with pytest.raises(torch.jit.Error, match=r"word was <Word.YES: 'yes'> when"):
            program(*args[:2], Word.NO, args[3])


def test_a_mapping_with_other_keys_or_a_tuple_of_another_length_is_named() -> None:
    def model(batch: dict[str, Any], pair: tuple[Any, ...]) -> torch.Tensor:
        result: torch.Tensor = batch["a"]["x"] @ pair[0].t()
        return result

    x = rand()
    frozen = amp_script.trace_and_freeze(model, ({"a": {"x": x, "n": 3}, "b": 1}, (x, 2)))
    for batch, given in (
        ({"a": {"x": x}, "b": 1}, "'x'"),
        ({"a": {"n": 3, "x": x, "y": x}, "b": 1}, "'n', 'x', 'y'"),
    ):
        with pytest.raises(InputError) as caught:
            frozen(batch, (x, 2))
        assert str(caught.value) == f"batch['a']: expected keys 'x', 'n', given {given}"
    with pytest.raises(InputError, match=r"^pair: expected 2 entries, given 3$"):
        frozen({"a": {"x": x, "n": 3}, "b": 1}, (x, 2, x))
