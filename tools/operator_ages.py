"""Write amp_script/operator_ages.txt: since which release libtorch has each operator.

A release's operators are the schema strings in its ``libtorch_cpu``, which hold every argument with
its name and default. Wheels for macOS hold that library at a tenth of the size of those for Linux:

    pip download --no-deps --only-binary :all: --platform macosx_11_0_arm64 --python-version 3.11 \\
        --implementation cp --abi cp311 --dest WHEELS torch==2.6.0

(``macosx_10_9_x86_64`` and Python 3.8 up to 2.2, ``macosx_14_0_arm64`` from 2.12), then

    python tools/operator_ages.py WHEELS

An operator counts from the first release after which every release has it, and an argument that
came later from the first release after which every release has that.
"""

from __future__ import annotations

import argparse
import re
import textwrap
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from amp_script.compatibility import AGES_FILE, Argument, Release, arguments_of

_SCHEMA = re.compile(rb"(?:\w+::)?\w+(?:\.\w+)?\([^\x00-\x08]*\) -> ?[^\x00]*")
_LEFT_OUT = re.compile(r"(\.|_)out\d?$|_backward|^aten::_foreach|_copy$|_copy\.")
"""Operators that no program for inference holds."""


def main() -> None:
    """Read the wheels in a folder and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="folder with one wheel of each release")
    releases = dict(sorted(_read(wheel) for wheel in parser.parse_args().wheels.glob("*.whl")))
    oldest = min(releases)
    since: dict[Release, list[str]] = defaultdict(list)
    late: list[str] = []
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name}.{schema.overload_name}".rstrip(".")
        if not name.startswith(("aten::", "prim::")) or _LEFT_OUT.search(name):
            continue
        born = _first({release: name in found for release, found in releases.items()})
        if born is None:
            continue
        since[born].append(name)
        for argument in arguments_of(schema):
            came = _first(
                {release: argument in found.get(name, ()) for release, found in releases.items()}
            )
            if came is not None and came > born:
                late.append(f"{_text(came)} {name} {argument}")
    lines = ["# Made by tools/operator_ages.py from the releases " + _range(releases)]
    for release in sorted(since):
        lines.append(f"[{_text(release)}]")
        lines += textwrap.wrap(" ".join(sorted(set(since[release]))), 100)
    lines += ["[later arguments]", *sorted(set(late))]
    AGES_FILE.write_text("\n".join(lines) + "\n")
    print(f"{sum(map(len, since.values()))} operators since {_text(oldest)}: {AGES_FILE}")


def _read(wheel: Path) -> tuple[Release, dict[str, set[Argument]]]:
    """A wheel's release and the arguments of each operator in it."""
    major, minor = wheel.name.split("-")[1].split(".")[:2]
    found: dict[str, set[Argument]] = defaultdict(set)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if re.search(r"libtorch(_cpu)?\.dylib$", member):
                for text in _schemas(archive.read(member)):
                    name, arguments = _parse(text)
                    found[name].update(arguments)
    return (int(major), int(minor)), found


def _schemas(library: bytes) -> Iterator[str]:
    for piece in re.split(rb"\x00+", library):
        if b") ->" in piece and _SCHEMA.fullmatch(piece.strip()):
            yield piece.strip().decode()


def _parse(schema: str) -> tuple[str, set[Argument]]:
    """Name and arguments of a schema; older ones have syntax that torch no longer parses."""
    name, rest = schema.split("(", 1)
    name = name if "::" in name else f"aten::{name}"
    arguments: set[Argument] = set()
    by_keyword = False
    for position, part in enumerate(_split(rest)):
        if part == "*":
            by_keyword = True
        elif by_keyword:
            arguments.add(re.sub(r"=.*", "", part).split()[-1])
        else:
            arguments.add(position)
    return name, arguments


def _split(text: str) -> list[str]:
    """The parts between the commas up to the parenthesis that closes the arguments."""
    parts, depth = [""], 0
    for letter in text:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _first(has: Mapping[Release, bool]) -> Release | None:
    """The first release from which on every release has something."""
    first = None
    for release in sorted(has, reverse=True):
        if not has[release]:
            break
        first = release
    return first


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"


def _range(releases: Mapping[Release, object]) -> str:
    return f"{_text(min(releases))} to {_text(max(releases))}"


if __name__ == "__main__":
    main()
