"""Digests of weight files: no byte is left out, and none is read twice while the file stays the same."""

from __future__ import annotations

import logging
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pypto_serving.errors import ModelError
from pypto_serving.model import fingerprint as module
from pypto_serving.model.fingerprint import digests
from tests.thinning import examples

CONTENT = os.urandom(10_500)
CHUNK = 1000


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once."""
    monkeypatch.setattr(module, "SETTLED_NS", -1)


class Weights:
    """Two files of weights, and a folder where digests are remembered."""

    def __init__(self, root: Path) -> None:
        self.cache = root / "cache"
        self.files = [root / "model" / name for name in ("a.safetensors", "b.safetensors")]
        self.files[0].parent.mkdir()
        for file in self.files:
            file.write_bytes(CONTENT)
        self.read_bytes = 0

    def digest(self) -> list[bytes]:
        self.read_bytes = 0
        return digests(self.files, str(self.cache), self.count)

    def count(self, phase: str, done: int, total: int) -> None:
        assert phase == "digests" and self.read_bytes < done <= total
        self.read_bytes = done

    @property
    def record(self) -> Path:
        (path,) = (self.cache / "digests").iterdir()
        return path


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return Weights(tmp_path)


def digest_of(content: bytes, folder: Path) -> bytes:
    (folder / "weights").write_bytes(content)
    (found,) = digests([folder / "weights"], "", lambda *_: None)
    return found


@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(CONTENT) - 1), flip=st.integers(1, 255))
def test_every_byte_counts(tmp_path: Path, place: int, flip: int) -> None:
    changed = bytearray(CONTENT)
    changed[place] ^= flip
    assert digest_of(bytes(changed), tmp_path) != digest_of(CONTENT, tmp_path)


def test_order_and_length_count(tmp_path: Path) -> None:
    first, second, rest = CONTENT[:CHUNK], CONTENT[CHUNK : 2 * CHUNK], CONTENT[2 * CHUNK :]
    contents = [CONTENT, second + first + rest, CONTENT[:-1], CONTENT + b"\0", rest, first, first + second, b""]
    assert len({digest_of(content, tmp_path) for content in contents}) == len(contents)
    assert digest_of(CONTENT, tmp_path) == digest_of(CONTENT, tmp_path)


@pytest.mark.usefixtures("settled")
def test_an_unchanged_file_is_not_read_again(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weights.digest()
    assert weights.read_bytes == 2 * len(CONTENT)
    monkeypatch.setattr(os, "pread", lambda *_: pytest.fail("a file was read"))
    assert weights.digest() == first and weights.read_bytes == 0


@pytest.mark.usefixtures("settled")
def test_only_changed_files_are_read_again(weights: Weights) -> None:
    first = weights.digest()
    before = weights.files[1].stat()
    with weights.files[1].open("r+b") as file:
        file.write(bytes([CONTENT[0] ^ 1]))
    os.utime(weights.files[1], ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync and restores of backups do
    second = weights.digest()
    assert weights.read_bytes == len(CONTENT)
    assert second[0] == first[0] and second[1] != first[1]
    assert weights.digest() == second and weights.read_bytes == 0


def test_a_file_that_just_changed_is_not_remembered(weights: Weights) -> None:
    """Its next change may leave it the same times."""
    weights.digest()
    weights.digest()
    assert weights.read_bytes == 2 * len(CONTENT)


@pytest.mark.usefixtures("settled")
def test_times_of_an_image_are_not_trusted(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of read-only file systems may give every version of a file the same times, in whole seconds."""

    def stat_in_image(path: Path) -> SimpleNamespace:
        stat = path.stat()
        return SimpleNamespace(
            st_size=stat.st_size, st_ino=stat.st_ino, st_mtime_ns=stat.st_mtime_ns, st_ctime_ns=1_700_000_000 * 10**9
        )

    monkeypatch.setattr(module, "_stat", stat_in_image)
    weights.digest()
    weights.digest()
    assert weights.read_bytes == 2 * len(CONTENT)


@pytest.mark.usefixtures("settled")
def test_a_damaged_record_is_not_believed(weights: Weights) -> None:
    first = weights.digest()
    content = weights.record.read_bytes()
    for damaged in (
        *(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(0, len(content), 7)),
        content[: len(content) // 2],
        content[33:],
        b"",
        b"\xff" * 100,
        module._check(b"[1]") + b"\n[1]",
    ):
        weights.record.write_bytes(damaged)
        assert weights.digest() == first and weights.read_bytes == 2 * len(CONTENT)
        assert weights.record.read_bytes() == content


@pytest.mark.usefixtures("settled")
def test_writers_do_not_disturb_each_other(weights: Weights) -> None:
    def one(_: int) -> list[bytes]:
        return digests(weights.files, str(weights.cache), lambda *_: None)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(one, range(40)))
    assert all(each == found[0] for each in found)
    assert weights.record.stat().st_mode & 0o777 == 0o600
    assert weights.digest() == found[0] and weights.read_bytes == 0


@pytest.mark.usefixtures("settled")
def test_the_oldest_records_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RECORDS", 3)
    cache, newest = tmp_path / "cache", []
    for i in range(6):
        (folder := tmp_path / str(i)).mkdir()
        (folder / "weights").write_bytes(CONTENT)
        digests([folder / "weights"], str(cache), lambda *_: None)
        newest = [path for path in (cache / "digests").iterdir() if path not in newest] + newest
    assert sorted((cache / "digests").iterdir()) == sorted(newest[:3])


@pytest.mark.usefixtures("settled")
def test_a_record_that_another_start_deletes_is_no_fault(weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    gone = weights.cache / "digests" / "gone"
    gone.parent.mkdir(parents=True)
    gone.symlink_to("nowhere")
    first = weights.digest()
    assert not caplog.records
    assert weights.digest() == first and weights.read_bytes == 0


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("settled")
def test_a_fifo_in_the_place_of_a_record_is_replaced(weights: Weights) -> None:
    first = weights.digest()
    record = weights.record
    record.unlink()
    os.mkfifo(record)
    assert weights.digest() == first and weights.read_bytes == 2 * len(CONTENT)
    assert weights.record.is_file()
    assert weights.digest() == first and weights.read_bytes == 0


@pytest.mark.timeout(60)
def test_a_fifo_in_the_place_of_weights_is_named(weights: Weights) -> None:
    weights.files[1].unlink()
    os.mkfifo(weights.files[1])
    with pytest.raises(ModelError, match=r"b\.safetensors cannot be read: it is not a regular file"):
        weights.digest()


@pytest.mark.usefixtures("settled")
def test_a_record_that_cannot_be_written_leaves_no_file(weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        weights.digest()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "are not kept" in caplog.text
    assert not list((weights.cache / "digests").iterdir())


def test_a_folder_that_cannot_be_written_is_a_warning(weights: Weights, caplog: pytest.LogCaptureFixture) -> None:
    weights.cache.write_bytes(b"")
    first = weights.digest()
    assert first == weights.digest() and weights.read_bytes == 2 * len(CONTENT)
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert "are not kept" in caplog.text


def test_a_file_that_changes_meanwhile_is_refused(weights: Weights) -> None:
    def append(_: str, done: int, total: int) -> None:
        with weights.files[0].open("ab") as file:
            file.write(b"more")

    with pytest.raises(ModelError, match=r"a\.safetensors was changed while it was read"):
        digests(weights.files, "", append)


def test_a_missing_file_is_named(weights: Weights) -> None:
    weights.files[1].unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors cannot be read: No such file"):
        weights.digest()
