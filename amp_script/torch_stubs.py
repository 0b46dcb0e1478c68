"""Where the type stubs for torch are, as a directory that a type checker takes.

The stubs are a partial stub package, ``torch-stubs``. A checker finds such a package beside the
packages of its interpreter, and nowhere puts it there unasked: another distribution owns that name
too. Named in a setting instead, mypy's ``mypy_path`` reads no partial package, and pyright hides
every stub that torch itself brings behind one. Both read a directory that *is* the package
``torch``, and take from the installed torch whatever the directory lacks. So that is what is made
here: the stubs, and for each package above them the installed ``__init__``, with its types as they
are.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from amp_script.errors import StubsError

__all__ = ["copy_of", "partial_package", "search_path", "write_search_path"]

MARK: Final = ".amp-script-stubs"
"""Name of the file that tells a directory of ours from anybody else's."""

_HEADER: Final = (
    "# mypy: ignore-errors\n# Copied by amp-script, for torch "
    + torch.__version__
    + ": changes here are lost.\n"
)

_RELATIVE_IMPORT: Final = re.compile(r"from\s+\.+\s*(?!import\b)[\w.]*|from\s+\.+")


def partial_package() -> Path:
    """The directory ``torch-stubs``, as it is in the wheel or in a checkout of the project."""
    here = Path(__file__).parent
    for parent in (here / "_stubs", here.parent / "stubs"):
        if (parent / "torch-stubs" / "py.typed").is_file():
            return parent / "torch-stubs"
    raise StubsError(
        f"no torch-stubs in {here / '_stubs'}: this installation of amp-script lacks it"
    )


def search_path(cache: Path | None = None) -> Path:
    """A directory for ``mypy_path`` or ``stubPath``, made for the installed torch if it is new.

    Its name says which torch it belongs to and holds a digest of its contents, so that one for
    another torch is another directory.

    Args:
        cache: where such directories are kept; ``amp-script`` in the user's cache if None.
    """
    files = _files()
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12]
    target = (cache or _user_cache()) / f"torch-{torch.__version__}-{digest}"
    if not (target / MARK).is_file():
        _write(target, files)
    return target


def write_search_path(target: Path) -> Path:
    """Make a directory for ``mypy_path`` or ``stubPath`` under a name of one's own.

    Raises:
        StubsError: there is something in ``target`` that this function did not write.
    """
    if target.exists() and any(target.iterdir()) and not (target / MARK).is_file():
        raise StubsError(f"{target} is not empty, and was not made by amp-script: name another")
    _write(target, _files())
    return target


def _files() -> dict[str, str]:
    """Text of every file of the directory by its path."""
    stubs = partial_package()
    texts = {path.relative_to(stubs).as_posix(): path.read_text() for path in stubs.rglob("*.pyi")}
    packages = {Path(name).parent for name in texts}
    packages |= {above for package in packages for above in package.parents}
    for package in sorted(packages):
        if f"{package.as_posix()}/__init__.pyi".removeprefix("./") not in texts:
            origin = _installed_init(package)
            texts[(package / origin.name).as_posix()] = copy_of(origin, package)
    return {f"torch/{name}": _HEADER + text for name, text in texts.items()}


def _installed_init(package: Path) -> Path:
    """The file that a checker reads for a package of torch when there are no stubs of ours."""
    installed = Path(torch.__file__).parent
    other_stubs = [Path(entry) / "torch-stubs" for entry in sys.path]
    for root in [*other_stubs, installed]:
        for name in ("__init__.pyi", "__init__.py"):
            if (root / package / name).is_file():
                return root / package / name
    raise StubsError(f"torch {torch.__version__} has no package {package} any more")


def copy_of(origin: Path, package: Path) -> str:
    """A package's ``__init__`` that is read elsewhere and yet finds the package's other modules."""
    module = ".".join(("torch", *package.parts))
    source = origin.read_text(encoding="utf-8")
    lines = source.splitlines()
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.level:
            line, start = lines[node.lineno - 1], node.col_offset
            absolute = f"from {_absolute(node, module)}"
            lines[node.lineno - 1] = line[:start] + _RELATIVE_IMPORT.sub(absolute, line[start:], 1)
    # pyright looks for what `from PACKAGE import MODULE` names in this directory alone.
    lines += [
        f"import {module}.{name} as {alias}"
        for name, alias in _imported_submodules(imports, module, package)
    ]
    return "\n".join(lines) + "\n"


def _absolute(node: ast.ImportFrom, module: str) -> str:
    """What ``from ... import`` names, in the ``__init__`` of a package."""
    parents = module.split(".")
    parts = parents[: len(parents) - node.level + 1] if node.level else []
    return ".".join(parts + ([node.module] if node.module else []))


def _imported_submodules(
    imports: list[ast.ImportFrom], module: str, package: Path
) -> Iterator[tuple[str, str]]:
    folder = Path(torch.__file__).parent / package
    for node in imports:
        if _absolute(node, module) != module:
            continue
        for alias in node.names:
            names = (alias.name, f"{alias.name}.py", f"{alias.name}.pyi")
            if any((folder / name).exists() for name in names):
                yield alias.name, alias.asname or alias.name


def _write(target: Path, files: Mapping[str, str]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for old in target.rglob("*.py*"):
        if old.relative_to(target).as_posix() not in files:
            old.unlink()
    for name, text in [*files.items(), (MARK, f"torch {torch.__version__}\n")]:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # A checker that runs meanwhile reads the old file or the new one, never half of it.
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def _user_cache() -> Path:
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    else:
        root = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(root).expanduser() / "amp-script"
