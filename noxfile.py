"""The tests on other versions of torch and Python: ``nox -l`` lists what there is.

Not a part of ``make test``: on Linux most versions of torch on PyPI are builds for CUDA, of several
gigabytes. To have builds for the CPU, name an index that has them::

    PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu nox -s "tests-3.11(torch='2.6')"

pip prefers them, because ``2.6.0+cpu`` counts as newer than ``2.6.0``. Arguments after ``--`` go to
pytest: ``nox -s "tests-3.11(torch='2.6')" -- tests/test_cli.py -x``.

All versions but torch's, and of what torch brings along, are those of ``constraints.txt``. What an
older torch does not let be compared is skipped in the tests, with the reason.
"""

from pathlib import Path
from tempfile import gettempdir

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
TORCHES = ("2.6", "2.9", "2.13", "2.14", "2.15")

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """Run the tests on one version of torch and Python."""
    _install(session, torch)
    # nox gives a session a TMPDIR of its own, too deep for the name of a socket, and inside a
    # repository that ignores it.
    environment = {"OMP_NUM_THREADS": "1", "TMPDIR": gettempdir()}
    session.run("pytest", *(session.posargs or ["-n", "auto"]), env=environment)


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def policies(session: nox.Session, torch: str) -> None:
    """Compare the policy tables with what one version of torch does; takes half a minute."""
    _install(session, torch)
    session.run("amp-script", "doctor", "--policies")


def _install(session: nox.Session, torch: str) -> None:
    """Install one torch, then all else, in which what came with that torch stays as it is."""
    session.install(f"torch=={torch}.*")
    freeze = ("python", "-m", "pip", "freeze", "--exclude-editable")
    came = str(session.run_install(*freeze, silent=True)).splitlines()
    lines = Path("constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    others = [line for line in pinned if _name(line) not in map(_name, came)]
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text("\n".join([*came, *others, ""]))
    session.install("--editable", ".[dev]", "--constraint", str(constraints))


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)
