"""FileStore: several servers share a folder of files, and nobody is served a wrong block."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pypto_serving.errors import ConfigError
from pypto_serving.store.files import HEADER_BYTES, UNUSED_S, FileStore
from pypto_serving.store.folder import fingerprint_folders, usage
from tests.clock import VirtualClock
from tests.store.blocks import (
    BLOCK_BYTES,
    FINGERPRINT,
    NUM_SLOTS,
    all_load,
    key_of,
    listed,
    loads,
    places,
    put,
    small_disk,
)

HELD = {(0, 0): key_of("a"), (1, 0): key_of("b"), (0, 3): key_of("c")}
Open = Callable[..., FileStore]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Open]:
    stores = []

    def open_store(
        num_slots: tuple[int, ...] = NUM_SLOTS, root: Path = tmp_path / "kv", **options: object
    ) -> FileStore:
        store = FileStore(root, FINGERPRINT, BLOCK_BYTES, num_slots, **options)  # type: ignore[arg-type]
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()


def file_of(root: Path, key: bytes) -> Path:
    (path,) = root.rglob(f"{key.hex()}.*")
    return path


def age(root: Path, seconds: dict[bytes, float]) -> None:
    for key, ago_s in seconds.items():
        then = time.time() - ago_s
        os.utime(file_of(root, key), (then, then))


def test_blocks_last_in_order_of_use(server: Open, tmp_path: Path) -> None:
    store = server()
    assert listed(store) == {}
    assert put(store, HELD) == [True] * 3
    assert all_load(store, HELD)
    age(tmp_path, {key_of("a"): 10, key_of("b"): 30, key_of("c"): 20})
    inventory = server().inventory()
    assert inventory.writable and inventory.shared
    assert list(listed(server()).values()) == [key_of("b"), key_of("c"), key_of("a")]


def test_servers_find_each_others_blocks(server: Open) -> None:
    first, second = server(), server()
    put(first, HELD)
    assert second.find([key_of("a"), key_of("x"), key_of("b")]) == [True, False, True]
    assert loads(second, (0, 5), key_of("a"))
    assert put(second, {(0, 1): key_of("a"), (0, 2): key_of("d")}) == [True, True]
    assert first.find([key_of("d")]) == [True]


def test_the_format_of_files_is_not_that_of_slots(server: Open, tmp_path: Path) -> None:
    """A server of an earlier version may share the folder, which must not be emptied under it."""
    put(server(), HELD)
    (path,) = tmp_path.rglob("meta.json")
    assert msgspec.json.decode(path.read_bytes())["format"] == 1


def test_a_file_that_vanishes_while_its_folder_is_read_hides_no_other(
    server: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it end the measuring of the folder, with which others make room."""
    keys = [bytes(1) + key_of(slot)[1:] for slot in range(4)]  # all in one folder
    put(server(), {(0, slot): key for slot, key in enumerate(keys)})
    real_scan = os.scandir

    class Entries:
        """What the system lists; the first block is deleted right after that."""

        def __init__(self, path: object) -> None:
            with real_scan(path) as entries:  # type: ignore[call-overload]
                self._entries = sorted(entries, key=lambda entry: entry.name)
            gone = [entry for entry in self._entries if entry.name.endswith(".0")][:1]
            for entry in gone:
                Path(entry.path).unlink()
                self._entries.remove(entry)
            self._entries[:0] = gone

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(self._entries)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Entries)
    assert len(listed(server())) == 3
    (folder,) = fingerprint_folders(tmp_path / "kv")
    assert usage(folder).num_bytes > 0
    monkeypatch.undo()
    assert sorted(listed(server()).values()) == sorted(keys)[2:]


def test_a_slot_that_gets_another_block_deletes_the_old_file(server: Open, tmp_path: Path) -> None:
    store = server()
    put(store, HELD)
    assert put(store, {(0, 0): key_of("d")}) == [True]
    assert store.find([key_of("a"), key_of("d")]) == [False, True]
    assert put(store, {(0, 0): key_of("d"), (1, 0): key_of("b")}) == [True, True]
    assert loads(store, (0, 0), key_of("d"))
    assert len(list(tmp_path.rglob("*.[01]"))) == 3


def test_a_block_that_moved_to_another_slot_stays(server: Open) -> None:
    store = server()
    put(store, {(0, 0): key_of("a")})
    put(store, {(0, 1): key_of("a")})
    put(store, {(0, 0): key_of("b")})
    assert loads(store, (0, 1), key_of("a"))


def test_the_size_follows_the_slots_over_restarts(server: Open, tmp_path: Path) -> None:
    for life in range(4):
        store = server((3, 0))
        for round_ in range(5):
            assert all(put(store, {place: key_of((life, round_, place)) for place in places(3)}))
        store.close()
        assert len(list(tmp_path.rglob("*.0"))) == 3


def test_what_no_slot_is_left_for_is_deleted_when_nobody_uses_it(server: Open, tmp_path: Path) -> None:
    put(server(), {place: key_of(place[1]) for place in places(6)})
    age(tmp_path, {key_of(slot): 10 + slot for slot in range(5)} | {key_of(5): UNUSED_S + 60})
    store = server((2, 0))
    assert sorted(listed(store).values()) == sorted([key_of(0), key_of(1)])
    assert store.find([key_of(slot) for slot in range(6)]) == [True] * 5 + [False]


def test_a_load_renews_an_old_file(server: Open, tmp_path: Path) -> None:
    put(server(), HELD)
    age(tmp_path, {key_of("a"): 7200, key_of("b"): 7300, key_of("c"): 7100})
    store = server()
    assert loads(store, (0, 0), key_of("a"))
    assert list(listed(server()).values()) == [key_of("b"), key_of("c"), key_of("a")]


@pytest.mark.parametrize("offset", [0, 20, 40, HEADER_BYTES, HEADER_BYTES + 8191])
def test_a_damaged_file_is_a_miss_and_deleted(
    server: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    store = server()
    put(store, HELD)
    path = file_of(tmp_path, key_of("a"))
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert not loads(store, (0, 0), key_of("a"))
    assert store.find([key_of("a")]) == [False]
    assert len(caplog.records) == 1
    assert put(store, {(0, 0): key_of("a")}) == [True]
    assert loads(store, (0, 0), key_of("a"))


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 100])
def test_a_short_file_is_not_there(server: Open, tmp_path: Path, size: int) -> None:
    store = server()
    put(store, HELD)
    os.truncate(file_of(tmp_path, key_of("a")), size)
    assert store.find([key_of("a")]) == [False]
    assert set(listed(server()).values()) == {key_of("b"), key_of("c")}
    assert not loads(store, (0, 0), key_of("a"))


def test_strange_files_are_left_alone(server: Open, tmp_path: Path) -> None:
    put(server(), HELD)
    path = file_of(tmp_path, key_of("a")).parent
    (path / "README").write_text("?")
    (path / f"{key_of('q').hex()}.7").write_text("?")
    (path / "host-1-2.part").write_text("being written")
    assert set(listed(server()).values()) == set(HELD.values())
    assert len(list(path.iterdir())) == 4


def test_a_full_file_system_is_said_once(server: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    with small_disk("tmpfs", tmp_path, 1 << 20) as root:
        store = server((400, 4), root / "kv", clock=clock)
        answers = [put(store, {place: key_of(place)})[0] for place in places(400)]
        kept = {place: key_of(place) for place, done in zip(places(400), answers, strict=True) if done}
        assert 20 < len(kept) < 128
        assert len(caplog.records) == 1
        assert all_load(store, kept)
        clock.advance(60)
        assert put(store, {next(iter(kept)): key_of("new")}) == [True]
        assert not list(root.rglob("*.part"))
        store.close()


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the option kv-disk"):
        FileStore(tmp_path / "file", FINGERPRINT, BLOCK_BYTES, NUM_SLOTS)


def test_find_looks_at_many_files(server: Open) -> None:
    store = server((200, 4))
    held = {place: key_of(place) for place in places(100)}
    assert all(put(store, held))
    wanted = [key for place in places(100) for key in (key_of(place), key_of((place, "not there")))]
    assert store.find(wanted) == [True, False] * 100
    store.close()
    assert store.find(wanted) == [False] * 200


def test_a_folder_that_cannot_be_listed_is_left_alone(
    server: Open, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server(), HELD)
    healthy = server()

    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(Path, "iterdir", fail)
    healthy.clear()
    store = server()
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "blocks cannot be deleted: input/output error",
        "blocks are not added: input/output error",
    ]
    assert not store.inventory().writable
    assert listed(store) == {}
    assert put(store, HELD) == [False] * 3
    assert not loads(store, (0, 0), key_of("a"))
    assert all_load(healthy, HELD)


def test_names_of_folders_last(server: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink())
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    store = server()
    (folder,) = (tmp_path / "kv").iterdir()
    assert synced[-2:] == [folder, folder.parent]
    synced.clear()
    put(store, {(0, 0): key_of("a")})
    put(store, {(0, 1): key_of("a")})
    inner = file_of(tmp_path, key_of("a")).parent
    assert synced == [folder, inner, inner]
