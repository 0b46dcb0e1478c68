"""Metadata: what is written is read back, and nothing else is read."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_script.metadata import SCHEMA_VERSION, InputSpec, Metadata, Verification

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
SHAPES = st.lists(st.none() | st.integers(0, 1 << 40), max_size=5).map(tuple)
NUMBERS = st.none() | st.floats(allow_nan=False, allow_infinity=False)

INPUTS = st.builds(
    InputSpec,
    name=st.text(),
    dtype=st.none() | DTYPES,
    shape=st.none() | SHAPES,
    device=st.none() | st.sampled_from(["cpu", "cuda"]),
)
METADATA = st.builds(
    Metadata,
    kind=st.sampled_from(["frozen", "scripted"]),
    dtype=st.none() | DTYPES,
    device=st.text(),
    inputs=st.lists(INPUTS, max_size=3).map(tuple),
    compute=st.sampled_from(["native", "upcast"]),
    verification=st.none() | st.builds(Verification, st.booleans(), NUMBERS, NUMBERS, NUMBERS),
    keep_float32=st.lists(st.text(), max_size=3).map(tuple),
    oldest_libtorch=st.none() | st.text(),
    lite_interpreter=st.none() | st.booleans(),
    torch_version=st.text(),
)


@given(METADATA)
def test_what_is_written_is_read_back(metadata: Metadata) -> None:
    assert Metadata.from_json(metadata.to_json()) == metadata


def test_every_field_has_a_reader() -> None:
    for cls in (Metadata, InputSpec, Verification):
        names = {field.name for field in dataclasses.fields(cls)}
        metadata = json.loads(_example().to_json())
        records = {"Metadata": metadata, "InputSpec": metadata["inputs"][0]}
        records["Verification"] = metadata["verification"]
        assert records[cls.__name__].keys() == names


def test_a_number_that_json_lacks_becomes_none() -> None:
    metadata = dataclasses.replace(
        _example(), verification=Verification(False, float("inf"), float("nan"), 0.5)
    )
    read = Metadata.from_json(metadata.to_json()).verification
    assert read == Verification(False, None, None, 0.5)


def test_what_the_first_version_wrote_is_read() -> None:
    document = json.loads(_example().to_json())
    del document["keep_float32"]
    document["schema_version"] = 1
    assert Metadata.from_json(json.dumps(document)) == _example()
    document["keep_float32"] = []
    with pytest.raises(ValueError, match="unknown 'keep_float32' for schema version 1"):
        Metadata.from_json(json.dumps(document))


def _example() -> Metadata:
    inputs = (InputSpec.of_tensor("x", torch.zeros(2, 3)),)
    return Metadata(
        "frozen", torch.bfloat16, "cpu", inputs, verification=Verification(True, 0, 0, 0)
    )


def _with(path: list[Any], value: Any) -> str:
    document = json.loads(_example().to_json())
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return json.dumps(document)


def _without(name: str) -> str:
    document = json.loads(_example().to_json())
    del document[name]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Expecting value"),
        ("[]", "expected a JSON object, found list"),
        ("null", "expected a JSON object, found NoneType"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        ('{"schema_version": 1, "schema_version": 1}', "a key appears twice"),
        (_with(["verification", "ulps"], float("nan")), "NaN is not a number"),
        (
            _with(["schema_version"], SCHEMA_VERSION + 1),
            f"newer than {SCHEMA_VERSION}, the newest that this",
        ),
        (_with(["schema_version"], 0), "schema version 0 does not exist"),
        (_with(["schema_version"], True), "schema_version: expected an integer, found True"),
        (_with(["schema_version"], "1"), "schema_version: expected an integer"),
        (_without("device"), "metadata: lacks device"),
        (_with(["extra"], 1), "metadata: has unknown 'extra'"),
        (_with(["kind"], "pickled"), "metadata.kind: expected one of frozen, scripted"),
        (_with(["dtype"], "torch.bfloat16"), "metadata.dtype: expected one of"),
        (_with(["dtype"], "load"), "metadata.dtype: expected one of"),
        (_with(["device"], None), "metadata.device: expected a string"),
        (_with(["compute"], "packed"), "metadata.compute: expected one of native, upcast"),
        (_with(["inputs"], {}), "metadata.inputs: expected a list"),
        (_with(["inputs", 0], []), "metadata.inputs[0]: expected an object"),
        (_with(["inputs", 0, "shape"], [1.5]), "metadata.inputs[0].shape[0]: expected an integer"),
        (_with(["inputs", 0, "name"], 3), "metadata.inputs[0].name: expected a string"),
        (_with(["lite_interpreter"], 1), "metadata.lite_interpreter: expected true or false"),
        (
            _with(["verification", "distance"], "0"),
            "metadata.verification.distance: expected a num",
        ),
    ],
)
def test_anything_else_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Metadata.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(METADATA, st.data())
def test_metadata_with_anything_anywhere_are_read_as_they_say_or_refused(
    metadata: Metadata, data: st.DataObject
) -> None:
    value = json.loads(metadata.to_json())
    places: list[tuple[Any, Any]] = []
    pending: list[Any] = [value]
    while pending:
        container = pending.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        places += [(container, key) for key in keys]
        pending += [each for key in keys if isinstance(each := container[key], (dict, list))]
    container, key = data.draw(st.sampled_from(places))
    container[key] = data.draw(JSON)
    text = json.dumps(value)
    try:
        read = Metadata.from_json(text)
    except ValueError:
        return
    assert json.loads(read.to_json()) == value


@given(st.text() | st.binary().map(lambda each: each.decode("latin-1")))
def test_any_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Metadata.from_json(text)
