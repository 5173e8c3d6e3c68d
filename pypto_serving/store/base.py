"""Store: the interface between transfers and the storage of blocks; also digests of blocks, and faults.

A store moves bytes; it makes no decisions.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import xxhash

from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import TierInventory
from pypto_serving.util import Backoff, Clock

DIGEST_BYTES = 16
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk, quota or file; later there may be room again."""

GONE = "its folder was deleted or moved away; a new one is made when the worker or the server starts again"


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a group: its key, its slot in a store, and its content on this host, uint8 [block_bytes].

    `memory` is contiguous. It begins at a multiple of 4096 bytes if the arena allows it, so do not rely on that.
    """

    group: int
    slot: int
    key: bytes
    memory: BlockBytes


class Store(Protocol):
    """Keeps blocks of `block_bytes[g]` bytes, for each of its groups, under (group, slot) and key.

    If a disk or network fails, no method raises: the piece's result is False, and the fault is logged once, in one
    line. Several threads may call `load` at once, while one thread calls `store`.
    """

    @property
    def writable(self) -> bool:
        """Whether blocks can be stored. Once false, it stays false."""

    def inventory(self) -> TierInventory:
        """Return the blocks held at the start, and whether more can be stored."""

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        """Replace the content of the blocks' slots. True: the block can be loaded; from a disk, even after a crash."""

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        """Read blocks into `memory`. False: the block is missing or damaged, and `memory` is undefined."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, per key, whether its block can be loaded, as far as known without reading it."""

    def clear(self) -> None:
        """Forget all blocks."""

    def close(self) -> None:
        """Close files and connections. Stored blocks stay."""


def digest(key: bytes, memory: BlockBytes) -> bytes:
    """Return XXH3-128 of key and content, 16 bytes. Releases the GIL except for small blocks.

    This takes a tenth of the time of reading, so every load is verified.
    """
    state = xxhash.xxh3_128(key)
    state.update(memory.data)
    return state.digest()


class StoreFaults:
    """Owns the fault state of a store. Any thread may report a fault.

    `reason`: why no more blocks are stored; "" while they can be stored.
    """

    def __init__(self, name: str, log: logging.Logger, clock: Clock) -> None:
        self._name, self._log, self._clock = name, log, clock
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._backoff = Backoff()
        self._is_full = False
        self.reason = ""

    def say(self, kind: str, message: str) -> None:
        """Log a fault, unless one of its kind was logged before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        self._log.warning("%s: %s", self._name, message)

    def stop_storing(self, reason: str) -> None:
        """Stop storing blocks, and log the reason."""
        self.reason = reason
        self.say("reader", f"blocks are not added: {reason}")

    def folder_gone(self) -> None:
        """Stop storing blocks, because the folder was deleted or moved. Open files can still be loaded."""
        self.reason = GONE
        self.say("gone", f"blocks are not added any more: {GONE}")

    def full(self, error: OSError) -> None:
        """Log that there is no room, and delay the next attempt."""
        self.say("full", f"no room for more blocks: {reason_of(error)}; what is there stays in use")
        self._is_full = True
        self._backoff.fail(self._clock())

    def may_try(self) -> bool:
        """Return whether the next attempt is due."""
        return self._backoff.is_over(self._clock())

    def found_room(self) -> None:
        """Record that there is room again, so that the next lack of room is logged."""
        if self._is_full:
            self._is_full = False
            self._backoff = Backoff()
            self._said.discard("full")


def reason_of(error: Exception) -> str:
    """Return why a call failed, without error numbers and file names."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)
