"""Packed weights in a file: read instead of packed, never served when damaged, never in the way of a start."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.base import Progress
from pypto_serving.backend.cpu import CpuBackend
from pypto_serving.kernels import Engine, hashes, runnable
from pypto_serving.model.packed_weights_file import MAGIC
from tests.checkpoints import make_checkpoint
from tests.model.conftest import MakeCheckpoint
from tests.model.packing import load, logits
from tests.needs import needs_kernels
from tests.thinning import examples

pytestmark = needs_kernels

ROOT = Path(__file__).resolve().parents[2]


def packed(folder: Path) -> Path:
    """The one file that is kept."""
    (path,) = folder.iterdir()
    assert path.suffix == ".packed"
    return path


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_second_start_reads_what_the_first_one_packed(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str
) -> None:
    path = checkpoint(kind, dtype=dtype)
    wanted = logits(load(path))
    assert np.array_equal(logits(load(path, tmp_path / "a/b")), wanted)
    before = packed(tmp_path / "a/b").stat()
    monkeypatch.setattr(Engine, "pack", lambda *_: pytest.fail("weights were packed"))
    assert np.array_equal(logits(load(path, tmp_path / "a/b")), wanted)
    after = packed(tmp_path / "a/b").stat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)


def test_all_instruction_sets_read_the_same_file(checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    contents = set()
    for kernels in runnable():
        load(checkpoint(), tmp_path / kernels, kernels)
        file = packed(tmp_path / kernels)
        contents.add((file.name, file.read_bytes()))
    assert len(contents) == 1


def test_progress_is_the_same_with_and_without_the_file(
    checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[tuple[str, int, int]]] = []
    prepare = CpuBackend.prepare

    def watched(backend: CpuBackend, _: Progress) -> Any:
        states: list[tuple[str, int, int]] = []
        seen.append(states)
        return prepare(backend, lambda *state: states.append(state))

    monkeypatch.setattr(CpuBackend, "prepare", watched)
    for folder in ("", tmp_path, tmp_path):
        load(checkpoint("qwen3_moe"), folder)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][-1][1] == seen[0][-1][2] > 0


class Kept:
    """A checkpoint with its file of packed weights, to be damaged again and again."""

    def __init__(self, root: Path) -> None:
        self.model, self.folder = make_checkpoint(root / "model", num_hidden_layers=1), root / "cache"
        self.logits = logits(load(self.model, self.folder))
        self.path = packed(self.folder)
        self.content = self.path.read_bytes()

    def heals(self, content: bytes) -> None:
        """Start on a file with `content`: it must not be served, and be whole afterwards."""
        self.path.write_bytes(content)
        assert np.array_equal(logits(load(self.model, self.folder)), self.logits)
        assert packed(self.folder).read_bytes() == self.content


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    return Kept(tmp_path_factory.mktemp("kept"))


@given(st.data())
@examples(40)
def test_a_flipped_bit_anywhere_is_found(kept: Kept, data: st.DataObject) -> None:
    size = len(kept.content)
    place = data.draw(st.integers(0, size - 1) | st.integers(0, 5000) | st.integers(size - 100, size - 1))
    damaged = bytearray(kept.content)
    damaged[place] ^= data.draw(st.integers(1, 255))
    kept.heals(bytes(damaged))


@given(st.data())
@examples(20)
def test_another_length_is_found(kept: Kept, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(kept.content) - 1) | st.integers(0, 5000))
    kept.heals(kept.content[:size])
    kept.heals(kept.content + bytes(1 + size % 5000))


def test_what_is_not_ours_is_not_read(kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = make_checkpoint(tmp_path / "other", num_hidden_layers=1, seed=1)
    load(other, tmp_path / "cache")
    for content, reason in (
        (kept.content.replace(MAGIC, MAGIC.replace(b"1", b"0"), 1), "another version"),
        (b"\x89PNG" + bytes(100_000), "not a file of packed weights"),
        (packed(tmp_path / "cache").read_bytes(), "holds other weights"),
    ):
        caplog.clear()
        kept.heals(content)
        assert [record.levelno for record in caplog.records] == [logging.WARNING]
        assert reason in caplog.text and "\n" not in caplog.messages[0]


@pytest.mark.parametrize("change", ["weights", "config"])
def test_a_changed_checkpoint_is_packed_anew(kept: Kept, tmp_path: Path, change: str) -> None:
    model, folder = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(kept.model, model)
    before = logits(load(model, folder))
    if change == "weights":
        file = model / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-5000:-3000] = content[-3000:-1000]
        file.write_bytes(content)
    else:
        text = (model / "config.json").read_text()
        (model / "config.json").write_text(text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    wanted = logits(load(model))
    assert not np.array_equal(wanted, before)
    assert np.array_equal(logits(load(model, folder)), wanted)
    assert np.array_equal(logits(load(model, folder)), wanted)
    assert len(list(folder.iterdir())) == 2


def test_another_time_of_change_is_another_file(kept: Kept, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(kept.model, model)
    load(model, folder)
    os.utime(model / "model.safetensors", ns=(1, 1))
    load(model, folder)
    assert len(list(folder.iterdir())) == 2


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 64 KiB, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_one_warning(kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_files():
        program = load(kept.model, tmp_path / "cache")
    assert np.array_equal(logits(program), kept.logits)
    assert caplog.messages == [f"packed weights are not kept in {tmp_path / 'cache'}: File too large"]
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("folder", ["file/cache", "link/cache", "file"])
def test_a_folder_that_cannot_be_written_is_one_warning(
    kept: Kept, tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("/proc/1")
    assert np.array_equal(logits(load(kept.model, tmp_path / folder)), kept.logits)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"packed weights are not kept in {tmp_path / folder}: ")


START = """
import sys
from pathlib import Path
from tests.model.packing import load, logits
import os, threading
{patch}
print("ready", flush=True)
sys.stdin.readline()
print(logits(load_now(Path(sys.argv[1]), sys.argv[2])).tobytes().hex(), flush=True)
"""


def start(kept: Kept, folder: Path, patch: str = "load_now = load") -> subprocess.Popen[str]:
    """A process that is ready to load the model."""
    command = [sys.executable, "-c", START.format(patch=patch), str(kept.model), str(folder)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, cwd=ROOT, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_two_starts_at_once(kept: Kept, tmp_path: Path) -> None:
    processes = [start(kept, tmp_path) for _ in range(2)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        assert bytes.fromhex(out) == kept.logits.tobytes()
    assert packed(tmp_path).read_bytes() == kept.content


HANGS = """
def load_now(*arguments):
    hanging = threading.Event()
    def hang(file):
        print("writing", flush=True)
        hanging.wait()
    os.fdatasync = hang
    return load(*arguments)
"""


def test_a_writer_that_is_killed_leaves_nothing_behind(kept: Kept, tmp_path: Path) -> None:
    process = start(kept, tmp_path, HANGS)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "writing\n"
    (part,) = tmp_path.iterdir()
    load(kept.model, tmp_path)
    assert list(tmp_path.iterdir()) == [part], "its writer lives"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (tmp_path / "0123.part").write_bytes(part.read_bytes())
    assert np.array_equal(logits(load(kept.model, tmp_path)), kept.logits)
    assert packed(tmp_path).read_bytes() == kept.content


def test_a_part_that_is_being_written_is_left_alone(kept: Kept, tmp_path: Path) -> None:
    with (tmp_path / "0123.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        load(kept.model, tmp_path)
        assert {path.suffix for path in tmp_path.iterdir()} == {".part", ".packed"}


ENDS = """
def load_now(*arguments):
    main = threading.main_thread()
    os.fdatasync = lambda file: main.join()
    threading.Thread.join, join = lambda self, *a: None if self.name == "packed-file" else join(self, *a), \
threading.Thread.join
    return load(*arguments)
"""


def test_a_process_that_ends_does_not_wait_for_the_file(kept: Kept, tmp_path: Path) -> None:
    process = start(kept, tmp_path, ENDS)
    out, err = process.communicate("\n", timeout=60)
    assert (process.returncode, bytes.fromhex(out)) == (0, kept.logits.tobytes())
    assert err == f"packed weights are not kept in {tmp_path}: the process ended before they were written\n"
    assert list(tmp_path.iterdir()) == []


@given(st.binary(min_size=1, max_size=700), st.data())
def test_a_hash_sees_every_byte(content: bytes, data: st.DataObject) -> None:
    place, flip = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(content)
    changed[place] ^= flip
    wanted = hashes(np.frombuffer(content, np.uint8))
    assert (hashes(np.frombuffer(changed, np.uint8)) != wanted).all()
    assert (hashes(np.frombuffer(content + b"\0", np.uint8)) != wanted).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_read_what_is_there(tmp_path: Path, threads: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, 3_000_001, np.uint8)
    (tmp_path / "file").write_bytes(content.tobytes())
    engine, out = Engine("", threads), np.zeros(2_500_000, np.uint8)
    with (tmp_path / "file").open("rb") as file:
        assert (engine.read(out, file.fileno(), 500_001) == hashes(content[500_001:])).all()
        assert (out == content[500_001:]).all()
        with pytest.raises(OSError, match="Input/output error"):
            engine.read(out, file.fileno(), 500_002)
