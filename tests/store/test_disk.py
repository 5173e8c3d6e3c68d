"""DiskStore: what is stored is there again, in order of use, on every kind of disk; damage is a miss."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.store.base import Piece
from pypto_serving.store.disk import DiskStore, file_system, is_shared, open_disk
from pypto_serving.store.files import FileStore
from pypto_serving.store.folder import IN_USE
from tests.clock import VirtualClock
from tests.store.blocks import (
    BLOCK_BYTES,
    FINGERPRINT,
    NUM_SLOTS,
    Disk,
    aligned,
    all_load,
    blank,
    content,
    key_of,
    listed,
    loads,
    mounted,
    piece,
    places,
    put,
    small_disk,
)

HELD = {(0, 0): key_of("a"), (1, 0): key_of("b"), (0, 3): key_of("c")}


@pytest.mark.parametrize("where", ["disk", "page cache"])
def test_blocks_last(disk: Disk, tmp_path: Path, where: str) -> None:
    if where == "page cache":
        with mounted(tmp_path / "kv", "-t", "tmpfs", "tmpfs"):
            check_that_blocks_last(disk)
    else:
        check_that_blocks_last(disk)


def check_that_blocks_last(disk: Disk) -> None:
    store = disk.open()
    assert store.inventory().writable
    assert listed(store) == {}
    assert put(store, HELD) == [True] * 3
    assert all_load(store, HELD)
    store.close()
    store = disk.open()
    assert list(listed(store).items()) == list(HELD.items())
    assert all_load(store, HELD)
    store.close()


def test_a_load_needs_the_place_and_the_key(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    assert not loads(store, (0, 0), key_of("c"))
    assert not loads(store, (0, 1), key_of("a"))
    assert not loads(store, (1, 3), key_of("a"))


def test_unaligned_memory_is_moved_too(disk: Disk) -> None:
    store, key = disk.open(), key_of("a")
    for group, size in enumerate(BLOCK_BYTES):
        memory = aligned(size + 1)[1:]
        memory[:] = content(key, size)
        assert store.store([Piece(group, 1, key, memory)]) == [True]
        wanted = Piece(group, 1, key, aligned(size + 1)[1:])
        assert store.load([wanted]) == [True]
        assert np.array_equal(wanted.memory, memory)


def test_a_slot_holds_what_was_stored_last(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    put(store, {(0, 0): key_of("d")})
    assert not loads(store, (0, 0), key_of("a"))
    assert loads(store, (0, 0), key_of("d"))
    store.close()
    assert listed(disk.open()) == {(1, 0): key_of("b"), (0, 3): key_of("c"), (0, 0): key_of("d")}


def test_what_was_loaded_is_used_last_after_a_restart(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    loads(store, (0, 0), key_of("a"))
    store.close()
    assert list(listed(disk.open())) == [(1, 0), (0, 3), (0, 0)]


def test_a_key_in_two_slots_is_listed_where_it_was_used_last(disk: Disk) -> None:
    store = disk.open()
    put(store, {(0, 0): key_of("a"), (0, 1): key_of("b"), (0, 2): key_of("a")})
    assert listed(store) == {(0, 1): key_of("b"), (0, 2): key_of("a")}


@pytest.mark.parametrize("counts", [(1, 1, 0), (0, 1, 1, 1), (1, 0), (2, 1, 0), (1, 1, 1, 0, 1, 1)])
def test_few_blocks_last_too(tmp_path: Path, counts: tuple[int, ...]) -> None:
    sizes, held = (64,) * len(counts), {(g, i): key_of((g, i)) for g, n in enumerate(counts) for i in range(n)}
    for _ in range(2):
        store = DiskStore(tmp_path, FINGERPRINT, sizes, (4,) * len(counts), 1 << 20)
        put(store, held, sizes)
        assert listed(store) == held
        store.close()


def test_find_knows_what_is_held(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    assert store.find([key_of("x"), key_of("b"), key_of("c")]) == [False, True, True]


@pytest.mark.parametrize("fingerprint", [b"another model", b""])
def test_models_share_a_folder_and_no_blocks(disk: Disk, fingerprint: bytes) -> None:
    first, second = disk.open(), disk.open(fingerprint=fingerprint)
    put(first, HELD)
    assert listed(second) == {}
    assert second.inventory().writable
    put(second, {(0, 0): key_of("z")})
    first.close()
    assert all_load(disk.open(), HELD)


def test_threads_load_beside_one_that_stores(disk: Disk) -> None:
    store = disk.open((64, 4))
    kept = {(0, slot): key_of(slot) for slot in range(32)}
    put(store, kept)
    failed: list[object] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            for place, key in kept.items():
                if not loads(store, place, key):
                    failed.append(place)
            for slot in range(32, 64):
                loads(store, (0, slot), key_of(f"0 {slot}"))

    threads = [threading.Thread(target=load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_ in range(30):
        assert all(put(store, {(0, slot): key_of(f"{round_ % 3} {slot}") for slot in range(32, 64)}))
    stop.set()
    for thread in threads:
        thread.join()
    assert failed == []


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        os.lseek(file.fileno(), offset, os.SEEK_SET)
        byte = file.read(1)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 16]), offset)
        os.fsync(file.fileno())


@pytest.mark.parametrize("offset", [0, 4095, 8191])
def test_a_flipped_bit_of_a_block_is_a_miss(disk: Disk, caplog: pytest.LogCaptureFixture, offset: int) -> None:
    store = disk.open()
    put(store, HELD)
    flip(disk.file("g0.slab"), offset)
    assert not loads(store, (0, 0), key_of("a"))
    assert not loads(store, (0, 0), key_of("a"))
    assert loads(store, (0, 3), key_of("c"))
    assert [record.getMessage() for record in caplog.records] == [
        f"disk tier in {disk.root}: a block is damaged, and is forgotten"
    ]
    store.close()
    assert listed(disk.open()) == {(1, 0): key_of("b"), (0, 3): key_of("c")}


@pytest.mark.parametrize("byte", range(64))
def test_a_flipped_bit_of_a_record_forgets_the_block(disk: Disk, byte: int) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    flip(disk.file("g0.index"), 3 * 64 + byte)
    store = disk.open()
    assert listed(store) == {(0, 0): key_of("a"), (1, 0): key_of("b")}
    assert put(store, {(0, 3): key_of("d")}) == [True]
    store.close()
    assert loads(disk.open(), (0, 3), key_of("d"))


def test_a_record_in_the_place_of_another_is_no_block(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    path = disk.file("g0.index")
    data = bytearray(path.read_bytes())
    data[64:128] = data[:64]
    path.write_bytes(data)
    assert (0, 1) not in listed(disk.open())


@pytest.mark.parametrize("name", ["g0.index", "g0.slab", "meta.json"])
@pytest.mark.parametrize("damage", ["empty", "missing", "noise", "short"])
def test_damaged_files_cost_blocks_and_nothing_else(disk: Disk, name: str, damage: str) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    path = disk.file(name)
    if damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes({"empty": b"", "noise": os.urandom(len(data)), "short": data[:70]}[damage])
    store = disk.open()
    assert store.inventory().writable
    found = listed(store)
    assert found.items() <= HELD.items()
    assert loads(store, (1, 0), key_of("b"))
    for place, key in found.items():
        loads(store, place, key)
    assert put(store, HELD) == [True] * 3
    store.close()
    assert all_load(disk.open(), HELD)


def test_a_file_cut_off_while_it_is_open_is_a_miss(disk: Disk) -> None:
    store = disk.open()
    put(store, HELD)
    os.truncate(disk.file("g0.slab"), 5000)
    assert not loads(store, (0, 0), key_of("a"))
    assert not loads(store, (0, 3), key_of("c"))


def test_a_later_format_is_left_alone(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    store = disk.open()
    put(store, HELD)
    store.close()
    path = disk.file("meta.json")
    path.write_bytes(b'{"format": 3, "groups": "by another rule"}')
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    store = disk.open()
    assert (store.inventory().writable, listed(store)) == (False, {})
    assert "format 3" in store.inventory().reason
    assert put(store, HELD) == [False] * 3
    assert not loads(store, (0, 0), key_of("a"))
    assert store.find([key_of("a")]) == [False]
    store.close()
    assert len(caplog.records) == 1
    disk.open(fingerprint=b"another", size_bytes=1).close()
    assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before


def test_a_folder_of_an_earlier_format_begins_anew(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a start is interrupted while it empties the folder."""
    unlink, store = Path.unlink, disk.open()
    put(store, HELD)
    store.close()
    path = disk.file("meta.json")
    path.write_text(path.read_text().replace('"format":2', '"format":1'))
    old = path.with_name("g0-0000.slab")
    old.write_bytes(b"blocks by another rule")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: unlink(path) if path != old else os.close(-1))
        assert not disk.open().writable and path.exists(), "else nobody would know what the rest is"
    store = disk.open()
    assert listed(store) == {} and not old.exists()
    assert put(store, HELD) == [True] * 3


def test_a_later_start_with_fewer_slots_gives_the_rest_back(disk: Disk) -> None:
    store = disk.open()
    put(store, {place: key_of(place) for place in places(6)})
    store.close()
    store = disk.open((3, 0))
    assert listed(store) == {place: key_of(place) for place in places(3)}
    assert disk.file("g0.slab").stat().st_size == 3 * 8192
    assert not list(disk.root.glob("*/g1.slab"))
    store.close()
    store = disk.open((6, 4))
    assert list(listed(store)) == list(places(3))
    assert all(put(store, {place: key_of(place) for place in places(6)}))


@pytest.mark.parametrize("kind", ["limit", "tmpfs", "ext4"])
def test_a_full_disk_keeps_what_fits(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("pypto_serving.store.slab.GROWTH_BYTES", 1 << 18)
    clock, count = VirtualClock(), 400
    with small_disk(kind, tmp_path, 2 << 20) as root:
        disk.root = root / "kv"
        store = disk.open((count, 4), clock=clock)
        answers = [put(store, {place: key_of(place)})[0] for place in places(count)]
        kept = {place: key_of(place) for place, done in zip(places(count), answers, strict=True) if done}
        assert 100 < len(kept) <= 256
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "no room for more blocks" in caplog.text
        assert listed(store) == kept
        assert all_load(store, kept)
        assert put(store, {(0, 0): key_of("new")}) == [True]
        size = disk.file("g0.slab").stat().st_size
        assert size % 8192 == 0, "what did not suffice was not given back"
        if kind != "limit":
            assert os.statvfs(root).f_bavail * os.statvfs(root).f_bsize < 1 << 16
        store.close()
        assert len(listed(disk.open((count, 4)))) == len(kept)
        disk.stores.pop().close()


def test_groups_share_the_end_of_a_disk(disk: Disk, tmp_path: Path) -> None:
    """One step of a slab's usual size would take more than all of it."""
    with small_disk("tmpfs", tmp_path, 2 << 20) as root:
        disk.root = root / "kv"
        store = disk.open((400, 400))
        kept = [sum(put(store, {(g, i): key_of((g, i))})[0] for i in range(40)) for g in (0, 1)]
        store.close()
        disk.stores.pop()
    assert kept == [40, 40]


def test_more_slots_on_a_full_disk_keep_what_there_is(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pypto_serving.store.slab.GROWTH_BYTES", 1 << 16)
    with small_disk("tmpfs", tmp_path, 1 << 20) as root:
        disk.root, ballast = root / "kv", root / "ballast"
        store = disk.open()
        held = {place: key_of(place) for place in places(6)}
        assert all(put(store, held))
        store.close()
        ballast.write_bytes(bytes(os.statvfs(root).f_bavail * os.statvfs(root).f_bsize))
        store = disk.open((4000, 4))
        assert store.inventory().writable
        assert listed(store) == held
        assert "no room for more than the 6 slots of group 0" in caplog.text
        assert put(store, {(0, 0): key_of("a"), (0, 6): key_of("b"), (0, 3999): key_of("c")}) == [True, False, False]
        assert not loads(store, (0, 3999), key_of("c"))
        assert all_load(store, {**held, (0, 0): key_of("a")})
        store.close()
        ballast.unlink()
        store = disk.open((4000, 4))
        assert put(store, {(0, 6): key_of("b")}) == [True]
        store.close()


def test_growing_is_tried_again_after_waits_that_double(disk: Disk, tmp_path: Path) -> None:
    clock = VirtualClock()
    with small_disk("tmpfs", tmp_path, 1 << 20) as root:
        disk.root = root / "kv"
        store, ballast = disk.open((4, 4), clock=clock), root / "ballast"

        def fill() -> None:
            ballast.write_bytes(bytes(os.statvfs(root).f_bavail * os.statvfs(root).f_bsize))

        fill()
        for wait_s in (1, 2, 4, 8, 16, 32, 60, 60):
            assert put(store, {(0, 0): key_of("a")}) == [False]
            ballast.unlink()
            clock.advance(wait_s - 0.25)
            assert put(store, {(0, 0): key_of("a")}) == [False], "room was asked for too early"
            fill()
            clock.advance(0.25)
        ballast.unlink()
        assert put(store, {(0, 0): key_of("a")}) == [True]
        store.close()


def test_a_file_system_that_becomes_read_only_is_read_on(
    disk: Disk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path / "kv", "-t", "tmpfs", "tmpfs") as root:
        store = disk.open()
        put(store, HELD)
        store.close()
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        store = disk.open()
        inventory = store.inventory()
        assert (inventory.writable, inventory.reason) == (False, "read-only file system")
        assert listed(store) == HELD
        assert all_load(store, HELD)
        assert put(store, HELD) == [False] * 3
        assert len(caplog.records) == 1
        with pytest.raises(ConfigError, match=r"the option kv-disk is .*, which cannot be used: read-only file system"):
            disk.open(fingerprint=b"another")
        store.close()


@pytest.mark.parametrize("place", ["file", "below a file"])
def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, place: str) -> None:
    path = tmp_path / "file"
    path.touch()
    path = path if place == "file" else path / "kv"
    with pytest.raises(ConfigError, match=f"the option kv-disk is {path}, which cannot be used") as caught:
        DiskStore(path, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/data/kv", "ext4", False),
        ("/data/nfs/kv", "nfs4", True),
        ("/data/nfs/with space/kv", "xfs", False),
        ("/data/fuse", "fuse.sshfs", True),
        ("/elsewhere", "overlay", False),
        ("/lustre/a/b", "lustre", True),
    ],
)
def test_shared_file_systems_are_known(path: str, kind: str, shared: bool) -> None:
    mountinfo = """\
22 1 0:20 / / rw,relatime - overlay overlay rw
30 22 8:1 / /data rw,relatime shared:1 - ext4 /dev/sda1 rw
31 30 0:40 / /data/nfs rw - nfs4 host:/export rw,vers=4.2
32 31 8:2 / /data/nfs/with\\040space rw - xfs /dev/sdb1 rw
33 30 0:41 / /data/fuse rw - ext4 /dev/sdc rw
34 30 0:42 / /data/fuse rw - fuse.sshfs host: rw
35 22 0:43 / /lustre rw - lustre 10.0.0.1@tcp:/fs rw
"""
    assert file_system(Path(path), mountinfo) == kind
    assert is_shared(Path(path), mountinfo) is shared


def test_the_kind_of_store_follows_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (tmp_path / "kv", FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30)
    for shared, kind in ((False, DiskStore), (True, FileStore)):
        monkeypatch.setattr("pypto_serving.store.disk.is_shared", lambda _, shared=shared: shared)
        store = open_disk(*arguments, known=False)
        assert isinstance(store, kind)
        store.close()


def test_stamps_of_many_loads_are_written_without_a_close(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = disk.open()
    put(store, HELD)
    for _ in range(1100):
        loads(store, (0, 0), key_of("a"))
    assert put(store, {(0, 1): key_of("d")}) == [True]
    wanted = [(1, 0), (0, 3), (0, 0), (0, 1)]
    assert list(listed(store)) == wanted
    reader = disk.open()
    assert list(listed(reader)) == wanted


def test_nothing_is_loaded_into_memory_of_a_block_that_is_not_there(disk: Disk) -> None:
    store, wanted = disk.open(), blank((0, 0), key_of("a"))
    assert store.load([wanted, piece((1, 1), key_of("b"))]) == [False, False]
    assert not wanted.memory.any()


@pytest.mark.parametrize("kind", [DiskStore, FileStore])
@pytest.mark.parametrize("known", [False, True])
def test_a_folder_that_was_used_and_fails_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[DiskStore] | type[FileStore], known: bool
) -> None:
    def opened() -> DiskStore | FileStore:
        if kind is FileStore:
            return FileStore(tmp_path / "kv", FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, known=known)
        return DiskStore(tmp_path / "kv", FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30, known=known)

    if known:
        (tmp_path / "kv").touch()
        reason = "not a directory"
    else:
        opened().close()
        (lock,) = tmp_path.rglob(IN_USE)
        lock.unlink()
        lock.mkdir()
        reason = "is a directory"
    store = opened()
    inventory = store.inventory()
    assert (inventory.writable, inventory.keys) == (False, b"")
    assert inventory.reason == f"it cannot be opened: {reason}"
    assert len(caplog.records) == 1
    assert put(store, HELD) == [False] * 3
    assert store.find([key_of("a")]) == [False]
    assert not loads(store, (0, 0), key_of("a"))
    store.clear()
    store.close()
