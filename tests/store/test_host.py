"""HostStore: blocks in memory that outlives the store, which may lack room."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pypto_serving.store.host import HostStore
from tests.store.blocks import BLOCK_BYTES, NUM_SLOTS, all_load, key_of, loads, put, small_disk

HELD = {(0, 0): key_of("a"), (1, 3): key_of("b"), (0, 5): key_of("c"), (1, 0): key_of("d")}


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_blocks_outlive_the_store(memory: int) -> None:
    assert put(HostStore(memory, BLOCK_BYTES, NUM_SLOTS), HELD) == [True] * len(HELD)
    again = HostStore(memory, BLOCK_BYTES, NUM_SLOTS)
    assert all_load(again, HELD)


def test_a_slot_holds_what_was_stored_last(memory: int) -> None:
    store = HostStore(memory, BLOCK_BYTES, NUM_SLOTS)
    put(store, HELD)
    for name in ("second", "third"):
        put(store, {(0, 0): key_of(name)})
        assert all_load(store, {**HELD, (0, 0): key_of(name)})


def test_without_room_nothing_is_stored_and_it_is_said_once(
    memory: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = HostStore(memory, BLOCK_BYTES, NUM_SLOTS)
    with small_disk("limit", tmp_path, BLOCK_BYTES[0]), caplog.at_level(logging.WARNING):
        assert put(store, HELD) == [True, False, False, False]
    assert [record.message for record in caplog.records] == [
        "host tier: no room for more blocks: file too large; what is there stays in use"
    ]
    assert loads(store, (0, 0), key_of("a"))
