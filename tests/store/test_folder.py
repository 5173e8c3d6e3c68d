"""Who may have a folder, and what gives way when the size limit is reached."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.store.folder import (
    FORMATS,
    IN_USE,
    META,
    WRITER,
    Folder,
    Meta,
    delete,
    fingerprint_folders,
    folder_name,
    read_meta,
    take_alone,
    usage,
)
from pypto_serving.store.inspect import verify
from tests.store.blocks import BLOCK_BYTES, Disk, all_load, key_of, listed, loads, places, put

ROOT = Path(__file__).resolve().parents[2]
HELD = {(0, 0): key_of("a"), (0, 1): key_of("b"), (1, 2): key_of("c")}
ONE_BYTES = 6 * 8192


def full(disk: Disk, name: str, used_at_s: float) -> Path:
    """A folder that takes ONE_BYTES and its tables, closed, and last used at a time."""
    store = disk.open(fingerprint=name.encode())
    assert all(put(store, {place: key_of((name, place)) for place in places(6)}))
    store.close()
    path = disk.root / folder_name(Meta(FORMATS["slots"], "slots", name.encode().hex(), BLOCK_BYTES))
    for file in path.iterdir():
        os.utime(file, (used_at_s, used_at_s))
    return path


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [META, "g0.index", "g0.slab"])
def test_a_fifo_in_a_folder_is_never_waited_for(disk: Disk, name: str) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    (path,) = fingerprint_folders(disk.root)
    (path / name).unlink()
    os.mkfifo(path / name)
    if name == META:
        with pytest.raises(ConfigError, match="it is not a regular file"):
            disk.open()
    else:
        store = disk.open()
        assert not loads(store, (0, 0), key_of("a"))
        store.close()
    with pytest.raises(OSError, match="not a regular file"):
        verify(path, lambda done, total: None)


def test_a_second_server_reads_what_the_first_one_wrote(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    first = disk.open()
    put(first, HELD)
    second = disk.open()
    inventory = second.inventory()
    assert not inventory.writable
    assert inventory.reason == f"another server, process {os.getpid()}, writes to it"
    assert len(caplog.records) == 1
    assert listed(second) == HELD
    assert put(second, {(0, 5): key_of("x")}) == [False]
    assert put(first, {(0, 0): key_of("d")}) == [True]
    assert not loads(second, (0, 0), key_of("a"))
    assert loads(second, (0, 1), key_of("b"))
    assert loads(first, (0, 0), key_of("d"))
    first.close()
    assert put(second, {(0, 5): key_of("x")}) == [False]
    second.close()
    assert listed(disk.open()) == {(0, 1): key_of("b"), (1, 2): key_of("c"), (0, 0): key_of("d")}


def test_a_reader_changes_nothing(disk: Disk) -> None:
    first = disk.open()
    put(first, HELD)

    def state() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in disk.folders()[0].iterdir()}

    before = state()
    reader = disk.open((2, 3))
    all_load(reader, HELD)
    put(reader, HELD)
    reader.close()
    assert state() == before


def test_the_lock_goes_with_its_process(disk: Disk) -> None:
    code = f"""
import sys
from tests.store.blocks import *
store = DiskStore({str(disk.root)!r}, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30)
print(store.inventory().writable, put(store, {{(0, 0): key_of('a')}}), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True [True]\n"
        reader = disk.open()
        assert f"process {child.pid}" in reader.inventory().reason
        assert loads(reader, (0, 0), key_of("a"))
        child.kill()
    assert disk.open().inventory().writable


def test_the_longest_unused_folders_give_way(disk: Disk) -> None:
    old, middle, new = (full(disk, name, used) for name, used in (("old", 10), ("middle", 20), ("new", 30)))
    each = usage(old).num_bytes
    store = disk.open(fingerprint=b"own", size_bytes=3 * each + ONE_BYTES // 2)
    assert {old, middle, new} <= set(disk.folders())
    put(store, {place: key_of(place) for place in places(1)})
    assert not old.exists()
    assert {middle, new} <= set(disk.folders())


def test_too_small_a_limit_leaves_one_folder(disk: Disk) -> None:
    others = [full(disk, name, 10) for name in ("a", "b")]
    store = disk.open(fingerprint=b"own", size_bytes=ONE_BYTES)
    assert all(put(store, {place: key_of(place) for place in places(6)}))
    assert not any(path.exists() for path in others)
    assert put(store, {(1, 0): key_of("beyond")}) == [False]
    assert sum(path.stat().st_size for path in disk.root.glob("*/*.slab")) <= ONE_BYTES


def test_what_another_server_has_open_stays(disk: Disk) -> None:
    other = disk.open(fingerprint=b"other")
    held = {place: key_of(place) for place in places(6)}
    put(other, held)
    store = disk.open(fingerprint=b"own", size_bytes=ONE_BYTES)
    assert all(put(store, {place: key_of(place) for place in places(6)}))
    assert all_load(other, held)


def test_only_folders_of_blocks_are_touched(disk: Disk) -> None:
    disk.root.mkdir()
    strange = disk.root / ("a" * 32)
    strange.mkdir()
    (strange / "thesis.txt").write_text("three years of work")
    (disk.root / "notes").write_text("mine")
    store = disk.open(size_bytes=1)
    put(store, HELD)
    assert fingerprint_folders(disk.root) == [path for path in disk.folders() if path != strange]
    assert (strange / "thesis.txt").exists()
    assert (disk.root / "notes").exists()


def test_a_folder_in_use_is_not_deleted(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    (path,) = disk.folders()
    assert usage(path).in_use
    assert not delete(path)
    store.close()
    assert not usage(path).in_use
    assert delete(path)
    assert disk.folders() == []


def test_a_half_deleted_folder_is_known_and_used_again(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    (path,) = disk.folders()
    for file in path.iterdir():
        if file.name != IN_USE:
            file.unlink()
    assert fingerprint_folders(disk.root) == [path]
    store = disk.open()
    assert listed(store) == {}
    assert all(put(store, HELD))


def test_a_server_that_starts_waits_for_a_deletion(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    (path,) = disk.folders()
    lock = take_alone(path)
    assert lock is not None
    code = f"""
from tests.store.blocks import *
print("begun", flush=True)
store = DiskStore({str(disk.root)!r}, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30)
print(listed(store), store.inventory().writable)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        os.close(lock)
        assert child.stdout.read() == "{} True\n"
    assert (path / WRITER).exists()


def test_servers_start_while_others_delete_what_nobody_uses(tmp_path: Path) -> None:
    meta, ended = Meta(FORMATS["slots"], "slots", "00", (8,)), threading.Event()

    def delete_all() -> None:
        while not ended.is_set():
            for path in tmp_path.iterdir():
                with contextlib.suppress(OSError):
                    delete(path)

    with ThreadPoolExecutor() as threads:
        others = [threads.submit(delete_all) for _ in range(2)]
        try:
            for _ in range(300):
                folder = Folder(tmp_path, meta)
                assert folder.writable and read_meta(folder.path) == meta
                folder.close()
        finally:
            ended.set()
    for other in others:
        other.result()
