"""Saved files: what they hold, who reads them, and what happens to those that are broken."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from amp_script import load, save, trace_and_freeze
from amp_script.artifact import move_devices, read_metadata
from amp_script.disk import stored_bytes
from amp_script.errors import ArgumentError, ArtifactError
from amp_script.frozen import FrozenModule
from amp_script.lowering._graph import nodes_of
from amp_script.metadata import EXTRA_FILE, SCHEMA_VERSION, Metadata

INPUT = torch.linspace(-1, 1, 32).reshape(4, 8)


def freeze(compute: Any = "native") -> FrozenModule:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 256)).eval()
    return trace_and_freeze(model, (INPUT,), compute=compute, verify=False)


class CallsPython(nn.Module):
    # Unannotated, because TorchScript does not resolve annotations of ignored methods here.
    @torch.jit.ignore
    def python(self, x):
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.python(x)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("artifact") / "model.pt"
    save(freeze(), path)
    return path


# --- what a file holds ----------------------------------------------------------------------------


def test_torch_reads_what_was_saved(artifact: Path) -> None:
    assert torch.equal(torch.jit.load(artifact)(INPUT), freeze()(INPUT))


def test_load_gives_back_the_program_and_its_metadata(artifact: Path) -> None:
    loaded = load(artifact, compute="native")
    assert isinstance(loaded, FrozenModule)
    assert torch.equal(loaded(INPUT), freeze()(INPUT))
    metadata = read_metadata(artifact)
    assert loaded.metadata == metadata
    assert dataclasses.replace(metadata, oldest_libtorch=None, lite_interpreter=None) == (
        freeze().metadata
    )
    assert metadata.lite_interpreter is True
    assert metadata.torch_version == torch.__version__


def test_the_archive_has_the_files_own_name_and_usual_rights(artifact: Path) -> None:
    names = zipfile.ZipFile(artifact).namelist()
    assert {name.partition("/")[0] for name in names} == {"model"}
    umask = os.umask(0)
    os.umask(umask)
    assert artifact.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("compute", ["native", "upcast", "packed"])
def test_whatever_plan_runs_the_same_weights_are_saved(compute: Any, tmp_path: Path) -> None:
    frozen = freeze(compute)
    assert frozen.compute == compute
    before = frozen(INPUT)
    for name in ("one.pt", "two.pt"):
        save(frozen, tmp_path / name)
        assert torch.equal(torch.jit.load(tmp_path / name)(INPUT), freeze()(INPUT))
    assert torch.equal(frozen(INPUT), before)
    again = load(tmp_path / "two.pt", compute=compute)
    assert torch.equal(again(INPUT), before)


def test_weights_are_stored_once_in_the_reduced_dtype(artifact: Path) -> None:
    stored = sum(item.file_size for item in zipfile.ZipFile(artifact).infolist())
    weights = 2 * (8 * 300 + 300 + 300 * 256 + 256)
    assert weights <= stored < 1.2 * weights


@pytest.mark.parametrize("compute", ["native", "upcast", "packed"])
def test_weights_of_two_paths_are_stored_once(compute: Any, tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    x = torch.randn(2, 10, 64)
    frozen = trace_and_freeze(model, x, compute="native")
    planned = FrozenModule.wrap(frozen, frozen.metadata, compute=compute)
    planned(x)
    save(planned, tmp_path / "model.pt")
    items = zipfile.ZipFile(tmp_path / "model.pt").infolist()
    stored = sum(item.file_size for item in items if "/constants/" in item.filename)
    weights = 2 * sum(parameter.numel() for parameter in model.parameters())
    # The fast path of torch takes the two norms in float32.
    assert weights <= stored <= weights + 2 * 2 * 2 * 64
    loaded = torch.jit.load(tmp_path / "model.pt")
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            assert torch.equal(loaded(x), load(tmp_path / "model.pt", compute="native")(x))
            assert torch.equal(
                loaded(x), FrozenModule.wrap(frozen, frozen.metadata, compute="native")(x)
            )


def test_a_baked_plan_gives_its_bits_everywhere(tmp_path: Path, artifact: Path) -> None:
    path = tmp_path / "baked.pt"
    save(freeze(), path, compute="upcast")
    expected = load(artifact, compute="upcast")(INPUT)
    assert torch.equal(torch.jit.load(path)(INPUT), expected)
    for compute in ("auto", "upcast"):
        loaded = load(path, compute=compute)
        assert loaded.compute == "upcast"
        assert torch.equal(loaded(INPUT), expected)
    metadata = read_metadata(path)
    assert metadata.compute == "upcast"
    assert metadata.verification is None
    assert expected.dtype == torch.bfloat16


@pytest.mark.parametrize("compute", ["native", "packed"])
def test_a_baked_plan_cannot_be_taken_out(compute: Any, tmp_path: Path) -> None:
    path = tmp_path / "baked.pt"
    save(freeze(), path, compute="upcast")
    with pytest.raises(ArgumentError, match="'upcast', the plan that the program has baked in"):
        load(path, compute=compute)
    with pytest.raises(ArgumentError, match="with which a program cannot be stored"):
        save(load(path), path, compute=compute)


def test_a_packed_plan_is_never_stored(tmp_path: Path) -> None:
    unknown: Any = "packed"
    with pytest.raises(ArgumentError, match="'packed', with which a program cannot be stored"):
        save(freeze("packed"), tmp_path / "model.pt", compute=unknown)
    assert not list(tmp_path.iterdir())


def test_a_scripted_module_is_saved_with_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "scripted.pt"
    save(torch.jit.script(nn.Linear(8, 4)), path)
    loaded = load(path)
    assert not isinstance(loaded, FrozenModule)
    assert loaded(INPUT).shape == (4, 4)
    assert read_metadata(path).kind == "scripted"
    with pytest.raises(ArgumentError, match="compute is 'upcast', which is for frozen modules"):
        save(torch.jit.script(nn.Linear(8, 4)), path, compute="upcast")


def test_map_location_says_where_inputs_are_expected(artifact: Path) -> None:
    assert torch.equal(load(artifact, compute="native", map_location="cpu")(INPUT), freeze()(INPUT))
    moved = read_metadata(artifact).on_device("cuda")
    assert moved.device == "cuda"
    assert [spec.device for spec in moved.inputs] == ["cuda"]


@pytest.mark.parametrize("device", ["ipu", "gpu", {"cpu": "ipu"}])
def test_a_device_that_is_not_here_is_named(artifact: Path, device: Any) -> None:
    with pytest.raises(ArgumentError, match="expected a device that this machine has"):
        load(artifact, map_location=device)


class MakesTensors(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[0], device=x.device)
        return x @ x.t() + places.to(x.device) + torch.zeros_like(x[0, 0], device="cpu")


def test_a_program_that_is_moved_makes_its_tensors_on_the_new_device(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    frozen = trace_and_freeze(
        MakesTensors().eval(), INPUT, check_inputs=[(INPUT[:2],)], compute="native", verify=False
    )
    save(frozen, path)
    # No other device is here to run on, so the program alone is looked at.
    module = torch.jit.load(path)
    assert named_devices(module) == {"cpu"}
    move_devices(module._c, "cpu", torch.device("cuda:1"))
    assert named_devices(module) == {"cuda:1"}
    move_devices(module._c, "cpu", torch.device("cuda:0"))
    assert named_devices(module) == {"cuda:1"}, "another device than the program's own stays"
    assert torch.equal(load(path, compute="native", map_location="cpu")(INPUT), frozen(INPUT))


def named_devices(module: Any) -> set[str]:
    return {
        str(node.output().toIValue())
        for node in nodes_of(module.graph)
        if node.kind() == "prim::Constant" and node.output().type().kind() == "DeviceObjType"
    }


# --- files that cannot be read --------------------------------------------------------------------


def rewrite(source: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> None:
    """Copy an archive, each member changed, or left out where ``change`` returns None."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for item in old.infolist():
            content = change(item.filename, old.read(item))
            if content is not None:
                new.writestr(item.filename, content)


def _missing(path: Path, artifact: Path) -> None:
    del path, artifact


def _folder(path: Path, artifact: Path) -> None:
    del artifact
    path.mkdir()


def _empty(path: Path, artifact: Path) -> None:
    del artifact
    path.touch()


def _text(path: Path, artifact: Path) -> None:
    del artifact
    path.write_text("not an archive " * 100)


def _checkpoint(path: Path, artifact: Path) -> None:
    del artifact
    torch.save({"weight": torch.zeros(3)}, path)


def _exported(path: Path, artifact: Path) -> None:
    del artifact
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


def _other_zip(path: Path, artifact: Path) -> None:
    del artifact
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello.txt", "hello")


def _plain_torchscript(path: Path, artifact: Path) -> None:
    del artifact
    torch.jit.script(nn.Linear(2, 2)).save(str(path))


def _cut_short(path: Path, artifact: Path) -> None:
    content = artifact.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _flipped_weight(path: Path, artifact: Path) -> None:
    content = bytearray(artifact.read_bytes())
    with zipfile.ZipFile(artifact) as archive:
        biggest = max(archive.infolist(), key=lambda item: item.file_size)
    content[biggest.header_offset + biggest.file_size // 2] ^= 1
    path.write_bytes(content)


def _newer_schema(path: Path, artifact: Path) -> None:
    version = f'"schema_version": {SCHEMA_VERSION}'.encode()
    newer = f'"schema_version": {SCHEMA_VERSION + 1}'.encode()
    rewrite(artifact, path, lambda name, content: content.replace(version, newer))


def _metadata_no_json(path: Path, artifact: Path) -> None:
    rewrite(
        artifact,
        path,
        lambda name, content: b"\xff\xfe" if name.endswith(EXTRA_FILE) else content,
    )


def _without_code(path: Path, artifact: Path) -> None:
    rewrite(artifact, path, lambda name, content: None if "/code/" in name else content)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_missing, "no such file"),
        (_folder, "a folder, not a file"),
        (_empty, "empty"),
        (_text, "no TorchScript archive, or cut short"),
        (_checkpoint, "weights or a model that torch.save pickled.* `amp-script freeze`"),
        (_exported, "a program of torch.export, and no TorchScript.*torch.export.load"),
        (_other_zip, "a zip archive, but no TorchScript program"),
        (_plain_torchscript, "not written by amp-script: it has no metadata.*torch.jit.load"),
        (_cut_short, "no TorchScript archive, or cut short"),
        (_flipped_weight, "damaged: model/constants/"),
        (_newer_schema, f"schema version {SCHEMA_VERSION + 1} is newer than {SCHEMA_VERSION}"),
        (_metadata_no_json, "unreadable metadata"),
        (_without_code, "cannot be loaded"),
    ],
)
def test_a_broken_file_is_one_error_that_names_it(
    make: Callable[[Path, Path], None], complaint: str, artifact: Path, tmp_path: Path
) -> None:
    path = tmp_path / "broken.pt"
    make(path, artifact)
    with pytest.raises(ArtifactError, match=complaint) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)
    assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(position=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), cut=st.booleans())
def test_any_damage_is_noticed_or_harmless(
    artifact: Path, tmp_path: Path, position: float, mask: int, cut: bool
) -> None:
    content = bytearray(artifact.read_bytes())
    index = int(position * len(content))
    if cut:
        del content[index:]
    else:
        content[index] ^= mask
    path = tmp_path / "damaged.pt"
    path.write_bytes(content)
    with contextlib.suppress(ArtifactError):
        assert torch.equal(load(path, compute="native")(INPUT), freeze()(INPUT))


def test_the_error_passes_between_processes() -> None:
    error = ArtifactError("model.pt", "damaged", "Save it again")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.path, again.reason, again.advice) == ("model.pt", "damaged", "Save it again")


def test_metadata_run_no_code(artifact: Path, tmp_path: Path) -> None:
    path, witness = tmp_path / "model.pt", tmp_path / "witness"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    rewrite(
        artifact,
        path,
        lambda name, content: (
            content.replace(b'"bfloat16"', f'"{code}"'.encode())
            if name.endswith(EXTRA_FILE)
            else content
        ),
    )
    with pytest.raises(ArtifactError, match=r"metadata\.dtype: expected one of"):
        load(path)
    assert not witness.exists()


# --- writing --------------------------------------------------------------------------------------


class _InterruptedError(Exception):
    pass


def _raise(*_: object, **__: object) -> None:
    raise _InterruptedError


def _ctrl_c(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGINT)


MOMENTS = {
    "write": (FrozenModule, "save"),
    "fsync": (os, "fsync"),
    "rename": (Path, "replace"),
}


@pytest.mark.parametrize(
    ("stop", "error"), [(_raise, _InterruptedError), (_ctrl_c, KeyboardInterrupt)]
)
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_stops_a_save_leaves_the_old_file(
    moment: str,
    stop: Callable[..., None],
    error: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"the old file")
    frozen = freeze("upcast")
    expected = frozen(INPUT)
    # A run that is started in the background is one that Ctrl-C does not reach.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(*MOMENTS[moment], stop)
            with pytest.raises(error):
                save(frozen, path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert path.read_bytes() == b"the old file"
    assert list(tmp_path.iterdir()) == [path]
    assert torch.equal(frozen(INPUT), expected)
    save(frozen, path)
    assert torch.equal(load(path, compute="upcast")(INPUT), expected)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no folders of that kind")
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    # Root may write anywhere but into what the kernel shows as files.
    folder = Path("/proc/self") if os.access(tmp_path, os.W_OK) else tmp_path
    try:
        with pytest.raises(ArtifactError, match="cannot write there") as caught:
            save(freeze(), folder / "model.pt")
    finally:
        tmp_path.chmod(0o700)
    assert caught.value.path == str(folder / "model.pt")


@pytest.mark.parametrize("length", [255, 256])
def test_a_name_as_long_as_files_have(length: int, tmp_path: Path) -> None:
    path = tmp_path / ("m" * (length - 3) + ".pt")
    if length == 255:
        save(freeze(), path)
        assert torch.equal(load(path, compute="native")(INPUT), freeze()(INPUT))
    else:
        with pytest.raises(ArtifactError, match="cannot write there: File name too long"):
            save(freeze(), path)


@pytest.mark.parametrize("name", ["ein Modell, größer.pt", "模型.pt", "a'b\"c;$(d).pt", "-m.pt"])
def test_names_with_any_characters(name: str, tmp_path: Path) -> None:
    save(freeze(), tmp_path / name)
    assert torch.equal(load(str(tmp_path / name), compute="native")(INPUT), freeze()(INPUT))


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        (b"model.pt", r"path is b'model.pt': expected a str or .*os.fsdecode\(path\) makes one"),
        (3, "path is 3: expected a str or a pathlib.Path. For an open file"),
        (io.BytesIO(), "path is <_io.BytesIO.*save_to_buffer"),
        ("a\0b", "expected a name without null characters"),
    ],
)
def test_what_is_no_path_is_shown(path: Any, complaint: str) -> None:
    frozen = freeze()
    for use in (lambda: save(frozen, path), lambda: frozen.save(path), lambda: load(path)):
        with pytest.raises(ArgumentError, match=complaint):
            use()


def test_what_cannot_be_saved_is_shown(tmp_path: Path) -> None:
    for module in (nn.Linear(2, 2), torch.jit.script(torch.nn.functional.relu), "model.pt"):
        wrong: Any = module
        with pytest.raises(ArgumentError, match=r"module is a .*: expected a ScriptModule"):
            save(wrong, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"the old file")
    program = (
        "import os, signal, sys, pathlib, torch\n"
        "import amp_script\n"
        "pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "amp_script.save(torch.jit.script(torch.nn.Linear(2, 2)), sys.argv[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(path)], check=False, timeout=120
    )
    assert done.returncode == -9
    assert path.read_bytes() == b"the old file"


def test_saving_replaces_what_a_link_points_to(tmp_path: Path) -> None:
    target, link = tmp_path / "target.pt", tmp_path / "link.pt"
    target.write_bytes(b"the old file")
    link.symlink_to(target)
    save(freeze(), link)
    assert link.is_symlink()
    assert isinstance(load(target), FrozenModule)


def test_a_place_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "model.pt"
    with pytest.raises(ArtifactError, match="cannot write there: No such file") as caught:
        save(freeze(), path)
    assert caught.value.path == str(path)


def test_a_module_that_cannot_be_exported_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        save(torch.jit.script(CallsPython()), tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_every_release_reads_its_own_metadata(artifact: Path) -> None:
    assert Metadata.from_json(read_metadata(artifact).to_json()) == read_metadata(artifact)


FULL_DISK = """
import resource, signal, sys
import torch, amp_script

module = amp_script.load(sys.argv[1]) if sys.argv[2] == "frozen" else torch.jit.load(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    amp_script.save(module, sys.argv[1])
except amp_script.errors.ArtifactError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits on a file's size")
@pytest.mark.parametrize("kind", ["frozen", "scripted"])
def test_a_full_disk_is_an_error_and_leaves_the_old_file(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(freeze(), path)
    before = path.read_bytes()
    command = [sys.executable, "-W", "ignore", "-c", FULL_DISK, str(path), kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{path}: cannot write there: File too large" in done.stdout
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ArtifactError, match="a device, pipe or socket"):
        save(freeze(), path)
    assert path.is_fifo()


@pytest.mark.parametrize("compute", ["native", "upcast", "packed"])
def test_room_is_asked_for_what_a_file_takes(compute: Any, tmp_path: Path) -> None:
    frozen = freeze(compute)
    save(frozen, tmp_path / "model.pt")
    size = (tmp_path / "model.pt").stat().st_size
    assert size <= stored_bytes(frozen._c) <= size + (2 << 20)


def test_threads_that_freeze_save_and_load_at_once(tmp_path: Path) -> None:
    plans: list[Any] = ["native", "upcast", "packed"] * 4
    model = nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 256)).eval()

    def program(compute: Any) -> FrozenModule:
        return trace_and_freeze(model, INPUT, compute=compute)

    expected = {compute: program(compute)(INPUT) for compute in set(plans)}

    def work(index: int) -> bool:
        frozen = program(plans[index])
        save(frozen, tmp_path / f"{index}.pt")
        save(frozen, tmp_path / "shared.pt")
        loaded = load(tmp_path / f"{index}.pt", compute=plans[index])
        return all(torch.equal(m(INPUT), expected[plans[index]]) for m in (frozen, loaded))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(len(plans))))
    assert torch.equal(load(tmp_path / "shared.pt", compute="native")(INPUT), expected["native"])
    assert len(list(tmp_path.iterdir())) == len(plans) + 1
