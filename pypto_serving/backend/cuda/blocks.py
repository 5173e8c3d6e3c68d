"""CardBlocks: the KV blocks in a card's memory, copied to and from the host beside its steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pypto_serving.backend.cuda.device import Card
from pypto_serving.types.arrays import BlockBytes

MAX_PINNED_BYTES = 256 << 20
"""Pinned memory of a thread and group. More blocks at once go through other memory, which is slower."""


class CardBlocks:
    """Owns no memory of the card; each thread has pinned memory of its own. Implements BlockMemory.

    `arenas[g]` is uint8 [num_blocks, block_bytes] on the device. What `read_blocks` and `staging` return is valid until
    the same thread calls one of them again for the group.
    """

    def __init__(self, arenas: Sequence[Tensor], device: Card) -> None:
        self._arenas, self._device = arenas, device
        self.block_bytes = tuple(arena.shape[1] for arena in arenas)
        self._threads = threading.local()

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Copy blocks to this thread's pinned memory."""
        room, arena = self._room(group, len(blocks)), self._arenas[group]
        self._device.exchange([(place, arena[block]) for place, block in zip(room, blocks, strict=True)])
        return list(room.numpy())

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return this thread's pinned memory."""
        return list(self._room(group, len(blocks)).numpy())

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Copy the filled memory to blocks."""
        arena, filled = self._arenas[group], map(torch.from_numpy, contents)
        self._device.exchange([(arena[block], content) for block, content in zip(blocks, filled, strict=True)])

    def _room(self, group: int, count: int) -> Tensor:
        """Return memory of this thread for `count` blocks, uint8 [count, block_bytes]; pinned unless they are many."""
        size = count * self.block_bytes[group]
        if size > MAX_PINNED_BYTES:
            return torch.empty(count, self.block_bytes[group], dtype=torch.uint8, device="cpu")
        rooms: dict[int, Tensor] = self._threads.__dict__.setdefault("rooms", {})
        if group not in rooms or len(rooms[group]) < size:
            rooms[group] = self._device.pinned(size)
        return rooms[group][:size].view(count, -1)
