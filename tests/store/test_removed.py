"""A folder that somebody deletes, moves or replaces under an open store: said once, and never a wrong block."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pypto_serving.store.disk import DiskStore
from pypto_serving.store.files import FileStore
from tests.store.blocks import BLOCK_BYTES, FINGERPRINT, NUM_SLOTS, all_load, key_of, listed, loads, put

HELD = {(0, 0): key_of("a"), (1, 0): key_of("b"), (0, 3): key_of("c")}
KINDS = ("slots", "files")
Opened = DiskStore | FileStore


def opened(kind: str, root: Path) -> Opened:
    if kind == "files":
        return FileStore(root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, known=True)
    return DiskStore(root, FINGERPRINT, BLOCK_BYTES, NUM_SLOTS, 1 << 30, known=True)


def replace(root: Path) -> None:
    shutil.rmtree(root)
    for kind in KINDS:
        other = opened(kind, root)
        put(other, {place: key_of(("other", place)) for place in HELD})
        other.close()


def move(root: Path) -> None:
    root.rename(root.with_name("elsewhere"))


def delete_part(root: Path) -> None:
    (part,) = root.iterdir()
    shutil.rmtree(part)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remove", [shutil.rmtree, delete_part, move, replace])
@pytest.mark.parametrize("first", ["store", "load"])
def test_a_folder_that_goes_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, remove: Callable[[Path], None], first: str
) -> None:
    root = tmp_path / "kv"
    store = opened(kind, root)
    assert all(put(store, HELD))
    remove(root)
    caplog.clear()
    if first == "load":
        for place, key in HELD.items():
            loads(store, place, key)
    assert put(store, {(0, 1): key_of("d"), (1, 0): key_of("e")}) == [False, False]
    assert not store.writable
    for place, key in HELD.items():
        loads(store, place, key)
    assert not loads(store, (0, 1), key_of("d"))
    assert put(store, HELD) == [False] * 3
    store.clear()
    (record,) = caplog.records
    assert "blocks are not added any more: its folder was deleted or moved away" in record.getMessage()
    store.close()
    again = opened(kind, root)
    assert again.writable
    assert not set(listed(again).values()) & set(HELD.values())
    assert all(put(again, HELD))
    assert all_load(again, HELD) if kind == "slots" else True
    again.close()


def test_slots_that_are_open_can_be_loaded_on(tmp_path: Path) -> None:
    store = opened("slots", tmp_path / "kv")
    assert all(put(store, HELD))
    shutil.rmtree(tmp_path / "kv")
    assert all_load(store, HELD)
    store.close()


def test_a_second_server_notices_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, reader = opened("slots", tmp_path / "kv"), opened("slots", tmp_path / "kv")
    assert all(put(store, HELD))
    shutil.rmtree(tmp_path / "kv")
    caplog.clear()
    for one in (store, reader, store, reader):
        for place, key in HELD.items():
            loads(one, place, key)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    store.close()
    reader.close()
