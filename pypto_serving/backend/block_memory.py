"""BlockMemory: read and write a device's KV blocks for lower tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pypto_serving.types.arrays import BlockBytes


class BlockMemory(Protocol):
    """The KV blocks of a device. Threads call it during steps, but never for a block that a step in flight writes."""

    block_bytes: tuple[int, ...]
    """Bytes of a block, per group."""

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return the contents of blocks, in host memory."""

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return host memory for the new contents of blocks. Fill it, then call `write_blocks`."""

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Write the filled `staging` memory to blocks."""


class HostBlocks:
    """Blocks in host memory, not copied: `arenas[g]`, uint8 [num_blocks, block_bytes]. Implements BlockMemory."""

    def __init__(self, arenas: Sequence[BlockBytes]) -> None:
        self.arenas = tuple(arenas)
        self.block_bytes = tuple(arena.shape[1] for arena in self.arenas)

    def read_blocks(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return views of the blocks."""
        return [self.arenas[group][block] for block in blocks]

    def staging(self, group: int, blocks: Sequence[int]) -> list[BlockBytes]:
        """Return views of the blocks, so that loads write to them directly."""
        return self.read_blocks(group, blocks)

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Sequence[BlockBytes]) -> None:
        """Do nothing: `contents` are views of the blocks."""
