"""The seam between transfers and the places that keep blocks: a Store moves bytes, and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.tier import TierInventory

BlockBytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of a group: its key, where a store keeps it, and its content, uint8 [block_bytes], on this host.

    `memory` is contiguous. It begins at a multiple of 4096 bytes where the arena allows that; do not rely on it.
    """

    group: int
    slot: int
    key: bytes
    memory: BlockBytes


class Store(Protocol):
    """Keeps blocks of one or several groups, of `block_bytes[g]` each, under (group, slot) and key.

    No method raises for what a disk or a network does: a piece that failed is False in the answer, and what is wrong is
    logged once, in one line. `load` may be called by several threads at once, beside one thread that calls `store`.
    """

    @property
    def writable(self) -> bool:
        """Whether blocks can be stored; once false, it stays so."""

    def inventory(self) -> TierInventory:
        """What is kept at the start, and whether more can be."""

    def store(self, pieces: Sequence[Piece]) -> list[bool]:
        """Keep blocks, each instead of what its slot held. True: it can be loaded, on a disk after a crash too."""

    def load(self, pieces: Sequence[Piece]) -> list[bool]:
        """Read blocks into `memory`. False: it is not there or not what was stored, and `memory` holds anything."""

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        """Which blocks could be loaded by key, as far as that can be told without reading them."""

    def clear(self) -> None:
        """Forget everything."""

    def close(self) -> None:
        """Let go of files and connections; what `store` answered for stays."""
