"""Input specs: the grammar, the tensors that come of it, and errors that point at the place."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_script.cli.specs import DTYPES, Range, TensorSpec, parse
from amp_script.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1x3x224x224", TensorSpec(None, torch.float32, None, (1, 3, 224, 224))),
        ("7", TensorSpec(None, torch.float32, None, (7,))),
        ("()", TensorSpec(None, torch.float32, None, ())),
        ("x=2x3", TensorSpec("x", torch.float32, None, (2, 3))),
        ("x1=()", TensorSpec("x1", torch.float32, None, ())),
        (
            "ids=int64[0,30522):1x128",
            TensorSpec("ids", torch.int64, Range(0, 30522, closed=False), (1, 128)),
        ),
        ("uint8[0,255]:4", TensorSpec(None, torch.uint8, Range(0, 255, closed=True), (4,))),
        ("int8[-128,128):4", TensorSpec(None, torch.int8, Range(-128, 128, closed=False), (4,))),
        (
            "float64[-1.5,+2e-1):2",
            TensorSpec(None, torch.float64, Range(-1.5, 0.2, closed=False), (2,)),
        ),
        ("bfloat16:2x2", TensorSpec(None, torch.bfloat16, None, (2, 2))),
        ("mask=bool:1x128", TensorSpec("mask", torch.bool, None, (1, 128))),
        ("float16[.5,.5]:1", TensorSpec(None, torch.float16, Range(0.5, 0.5, closed=True), (1,))),
        ("größe=3", TensorSpec("größe", torch.float32, None, (3,))),
    ],
)
def test_parses(text: str, expected: TensorSpec) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    ("text", "column", "expected", "found"),
    [
        ("", 1, "a size, or a dtype", "the spec ends"),
        ("1x", 3, "a size", "the spec ends"),
        ("1xx3", 3, "a size", "'x3'"),
        ("x3", 1, "a size", "'x3'"),
        ("1x3x", 5, "a size", "the spec ends"),
        ("1 x 3", 2, "'x' and another size", "' x 3'"),
        ("0x3", 1, "a size of at least 1", "'0x3'"),
        ("-1x3", 1, "a size, or a dtype", "'-1x3'"),
        ("ids=", 5, "a size, or a dtype", "the spec ends"),
        ("ids=int65[0,1):3", 5, "a size, or a dtype (float32, ", "'int65[0,1):3'"),
        ("int64:3", 6, "a range after an integer dtype", "':3'"),
        ("int64[0:3", 8, "',' and the upper end", "':3'"),
        ("int64[0,5:3", 10, "')' (upper end excluded) or ']'", "':3'"),
        ("int64[0,5)3", 11, "':' and the sizes", "'3'"),
        ("int64[0.5,5):3", 8, "',' and the upper end", "'.5,5):3'"),
        ("int64[5,5):3", 7, "a range with values of int64 in it", "'5,5):3'"),
        ("int64[5,4]:3", 7, "a range with values of int64 in it", "'5,4]:3'"),
        ("uint8[0,256]:3", 7, "a range within 0 and 255", "'0,256]:3'"),
        ("int8[-129,0]:3", 6, "a range within -128 and 127", "'-129,0]:3'"),
        ("float16[0,1e6):3", 9, "a range within -65504.0 and 65504.0", "'0,1e6):3'"),
        ("float32[0,1e999):3", 11, "a finite number", "'1e999):3'"),
        ("float32[nan,1):3", 9, "a number", "'nan,1):3'"),
        ("bfloat16[0.999,1):3", 10, "a range with values of bfloat16 in it", "'0.999,1):3'"),
        ("float32", 8, "'[' and a range, or ':'", "the spec ends"),
        ("bool[0,1]:3", 5, "':' and the sizes (bool takes no range)", "'[0,1]:3'"),
        ("a=b=3", 3, "a size, or a dtype", "'b=3'"),
        ("1x3,1x3", 4, "'x' and another size", "',1x3'"),
    ],
)
def test_an_error_names_spec_column_and_what_was_expected(
    text: str, column: int, expected: str, found: str
) -> None:
    with pytest.raises(UsageError) as raised:
        parse(text)
    message = str(raised.value)
    assert message.startswith(f"input spec {text!r}, column {column}: expected {expected}")
    assert message.endswith(found) or f"found {found}" in message
    assert "\n" not in message


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="x=[](),:.0123456789-+e int64float32bool", max_size=20))
def test_any_text_is_a_spec_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert all(size >= 1 for size in parse(text).shape)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([name for name in DTYPES if name != "bool"]),
    st.integers(-70, 70),
    st.integers(1, 50),
    st.booleans(),
)
def test_values_lie_in_the_range(name: str, low: int, width: int, closed: bool) -> None:
    if name == "uint8":
        low = abs(low)
    spec = parse(f"{name}[{low},{low + width}{']' if closed else ')'}:64x4")
    tensor = spec.make(torch.Generator().manual_seed(0))
    assert tensor.dtype is DTYPES[name]
    assert tensor.shape == (64, 4)
    assert tensor.min() >= low
    assert tensor.max() <= low + width if closed else tensor.max() < low + width


def test_both_ends_of_an_integer_range_are_drawn() -> None:
    drawn = parse("uint8[254,255]:100").make(torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {254, 255}


def test_without_a_range() -> None:
    generator = torch.Generator().manual_seed(0)
    normal = parse("float64:10000").make(generator)
    assert abs(normal.mean()) < 0.1
    assert abs(normal.std() - 1) < 0.1
    assert set(parse("bool:100").make(generator).tolist()) == {False, True}
    assert parse("()").make(generator).shape == ()


def test_the_generator_decides() -> None:
    first, second = (parse("4").make(torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
