"""The host tier: blocks in shared memory that outlives a worker."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

from pypto_serving.store.base import BlockBytes, Piece
from pypto_serving.types.tier import TierInventory
from pypto_serving.util import ceil_div

ALIGNMENT = 4096


class HostStore:
    """Blocks of group g in slots of `block_bytes[g]` bytes, rounded up to 4096, one group behind the other.

    `fd` is memory that a parent owns (a memfd), which is made as large as the slots need; pages cost nothing until they
    are written. What it holds is known by the engine core alone, so there is no inventory.
    """

    def __init__(self, fd: int, block_bytes: tuple[int, ...], num_slots: tuple[int, ...]) -> None:
        strides = [ceil_div(size, ALIGNMENT) * ALIGNMENT for size in block_bytes]
        total = sum(stride * slots for stride, slots in zip(strides, num_slots, strict=True))
        if os.fstat(fd).st_size < total:
            os.ftruncate(fd, total)
        memory = np.frombuffer(mmap.mmap(fd, total), dtype=np.uint8)
        self._slots: list[BlockBytes] = []
        start = 0
        for size, stride, slots in zip(block_bytes, strides, num_slots, strict=True):
            region = memory[start : start + stride * slots].reshape(slots, stride)
            self._slots.append(region[:, :size])
            start += stride * slots

    @property
    def writable(self) -> bool:
        return True

    def inventory(self) -> TierInventory:
        return TierInventory("host")

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        for piece in pieces:
            np.copyto(self._slots[piece.group][piece.slot], piece.memory)
        return [True] * len(pieces)

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        for piece in pieces:
            np.copyto(piece.memory, self._slots[piece.group][piece.slot])
        return [True] * len(pieces)

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def clear(self) -> None:
        """Nothing is found here by key."""

    def close(self) -> None:
        """The memory is the parent's."""
