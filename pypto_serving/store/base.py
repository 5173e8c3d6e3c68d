"""Store: the seam between transfers and the places that keep blocks; with the digest of a block, and faults.

A store moves bytes and decides nothing.
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
"""The disk, a quota or the file size limit is used up. Room may come back."""

GONE = "its folder was deleted or moved away; a new one is made when the worker or the server starts again"


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a group: its key, its slot in a store, and its content on this host, uint8 [block_bytes].

    `memory` is contiguous. Where the arena allows it begins at a multiple of 4096 bytes; do not rely on that.
    """

    group: int
    slot: int
    key: bytes
    memory: BlockBytes


class Store(Protocol):
    """Keeps blocks of `block_bytes[g]` bytes, for each of its groups, under (group, slot) and key.

    No method raises when a disk or network fails: the answer for the piece is False, and the fault is logged once, in
    one line. Several threads may call `load` at once, beside one thread that calls `store`.
    """

    @property
    def writable(self) -> bool:
        """Whether blocks can be stored. Once false, it stays false."""

    def inventory(self) -> TierInventory:
        """Return the blocks kept at the start, and whether more can be stored."""

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        """Replace the content of the blocks' slots. True: the block can be loaded, from a disk also after a crash."""

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        """Read blocks into `memory`. False: the block is missing or damaged, and `memory` is undefined."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which keys can be loaded, as far as that is known without reading the blocks."""

    def clear(self) -> None:
        """Forget all blocks."""

    def close(self) -> None:
        """Close files and connections. Blocks that `store` confirmed stay."""


def digest(key: bytes, memory: BlockBytes) -> bytes:
    """Return XXH3-128 of key and content, 16 bytes. The GIL is released for all but small blocks.

    That takes a tenth of the time of reading, so every load is verified.
    """
    state = xxhash.xxh3_128(key)
    state.update(memory.data)
    return state.digest()


class StoreFaults:
    """Owns what is known about a store's faults. Any thread may report one.

    `reason` says why nothing more is stored; it is empty while blocks can be stored.
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
        """Store nothing more, and log why."""
        self.reason = reason
        self.say("reader", f"blocks are not added: {reason}")

    def folder_gone(self) -> None:
        """Store nothing more, because the folder was deleted or moved. What is open can still be loaded."""
        self.reason = GONE
        self.say("gone", f"blocks are not added any more: {GONE}")

    def full(self, error: OSError) -> None:
        """Log that there is no room, and wait before the next try."""
        self.say("full", f"no room for more blocks: {reason_of(error)}; what is there stays in use")
        self._is_full = True
        self._backoff.fail(self._clock())

    def may_try(self) -> bool:
        """Return whether it is time to try again."""
        return self._backoff.is_over(self._clock())

    def found_room(self) -> None:
        """Note that there is room again: the next lack of it is logged."""
        if self._is_full:
            self._is_full = False
            self._backoff = Backoff()
            self._said.discard("full")


def reason_of(error: Exception) -> str:
    """Return why a call failed, without error numbers and file names."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)
