"""Store: the seam between transfers and the places that keep blocks. It moves bytes and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pypto_serving.types.arrays import BlockBytes
from pypto_serving.types.tier import TierInventory


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
