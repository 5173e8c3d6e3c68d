"""HostStore: the host tier, blocks in shared memory that outlives a worker."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Sequence

import numpy as np

from pypto_serving.store.base import Piece, StoreFaults, reason_of
from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import ALIGNMENT, TierInventory
from pypto_serving.util import ceil_div, write_at

log = logging.getLogger(__name__)


class HostStore:
    """Keeps blocks of group g in slots of `block_bytes[g]` bytes, rounded up to 4096, one group after the other.

    `fd` is a memfd owned by a parent, and enlarged to hold all slots; pages take no memory until they are written. Only
    the engine core knows its content, so the inventory is empty.

    The first block of a slot is written to the file. This allocates pages in half the CPU time of page faults, and
    returns an error if there is no room, while a page fault would end the process. All other accesses use the mapping.
    """

    def __init__(self, fd: int, block_bytes: tuple[int, ...], num_slots: tuple[int, ...]) -> None:
        strides = [ceil_div(size, ALIGNMENT) * ALIGNMENT for size in block_bytes]
        total = sum(stride * slots for stride, slots in zip(strides, num_slots, strict=True))
        if os.fstat(fd).st_size < total:
            os.ftruncate(fd, total)
        memory = np.frombuffer(mmap.mmap(fd, total), dtype=np.uint8)
        self._fd, self._strides = fd, strides
        self._faults = StoreFaults("host tier", log, time.monotonic)
        self._starts: list[int] = []
        self._mapped = [bytearray(slots) for slots in num_slots]
        self._slots: list[BlockBytes] = []
        start = 0
        for size, stride, slots in zip(block_bytes, strides, num_slots, strict=True):
            region = memory[start : start + stride * slots].reshape(slots, stride)
            self._starts.append(start)
            self._slots.append(region[:, :size])
            start += stride * slots

    @property
    def writable(self) -> bool:
        return True

    def inventory(self) -> TierInventory:
        return TierInventory("host")

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        return [self._write(piece) for piece in pieces]

    def _write(self, piece: Piece) -> bool:
        group, slot = piece.group, piece.slot
        if self._mapped[group][slot]:
            np.copyto(self._slots[group][slot], piece.memory)
            return True
        try:
            write_at(self._fd, piece.memory.data, self._starts[group] + slot * self._strides[group])
        except OSError as error:
            self._faults.say("write", f"no room for more blocks: {reason_of(error)}; what is there stays in use")
            return False
        self._slots[group][slot][::ALIGNMENT].max()  # reading maps existing pages, sixteen per page fault
        self._mapped[group][slot] = True
        return True

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        for piece in pieces:
            np.copyto(piece.memory, self._slots[piece.group][piece.slot])
        return [True] * len(pieces)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def clear(self) -> None:
        """Do nothing: blocks are not found by key here."""

    def close(self) -> None:
        """Do nothing: the parent owns the memory."""
