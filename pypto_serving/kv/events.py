"""EventLog: owner of what happened to cached blocks, in all tiers, for those who follow the cache."""

from __future__ import annotations

from pypto_serving.types.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from pypto_serving.types.tier import Tier

Content = tuple[bytes, bytes, bool]
"""Key of the parent, token ids as int32 bytes, whether salted."""


class HeldBlock:
    """A block of a group that `tiers` hold; `content` is None until a request with its tokens comes by."""

    __slots__ = ("content", "tiers")

    def __init__(self) -> None:
        self.tiers: list[Tier] = []
        self.content: Content | None = None


class EventLog:
    """Owns the events since the last `take`, and the tokens of each block that some tier holds.

    Pools say what they hold and forget; the KVCacheManager describes blocks, without which no event tells of them.
    """

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._blocks: dict[tuple[int, bytes], HeldBlock] = {}
        self._let_go: list[tuple[int, bytes]] = []
        self.num_unknown = 0

    def held(self, tier: Tier, g: int, key: bytes) -> None:
        """A tier holds a block from now on."""
        block = self._blocks.get((g, key))
        if block is None:
            block = self._blocks[g, key] = HeldBlock()
            self.num_unknown += 1
        block.tiers.append(tier)
        if block.content is not None:
            self._events.append(BlockStored(tier, g, key, *block.content))

    def gone(self, tier: Tier, g: int, key: bytes) -> None:
        """A tier forgot a block."""
        block = self._blocks[g, key]
        block.tiers.remove(tier)
        if block.content is not None:
            self._events.append(BlockRemoved(tier, g, key))
        if not block.tiers:
            self._let_go.append((g, key))

    def cleared(self, tier: Tier) -> None:
        """A tier forgot everything; what it says to hold before the next `take` is still known."""
        for pair, block in self._blocks.items():
            if tier in block.tiers:
                block.tiers.remove(tier)
                if not block.tiers:
                    self._let_go.append(pair)
        self._events.append(AllBlocksCleared(tier))

    def lacks(self, g: int, key: bytes) -> bool:
        """Whether a tier holds this block and nobody has described it."""
        block = self._blocks.get((g, key))
        return block is not None and block.content is None

    def describe(self, g: int, key: bytes, content: Content) -> None:
        """What is in a block that `lacks` it."""
        block = self._blocks[g, key]
        block.content = content
        self.num_unknown -= 1
        self._events += [BlockStored(tier, g, key, *content) for tier in block.tiers]

    def take(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        for pair in self._let_go:
            block = self._blocks.get(pair)
            if block is not None and not block.tiers:
                del self._blocks[pair]
                self.num_unknown -= block.content is None
        self._let_go.clear()
        events, self._events = self._events, []
        return events


class PoolEvents:
    """What one pool, of group `g` in `tier`, says to the log."""

    __slots__ = ("_g", "_log", "_tier")

    def __init__(self, log: EventLog, tier: Tier, g: int) -> None:
        self._log, self._tier, self._g = log, tier, g

    def held(self, key: bytes) -> None:
        self._log.held(self._tier, self._g, key)

    def gone(self, key: bytes) -> None:
        self._log.gone(self._tier, self._g, key)


def pool_events(log: EventLog | None, tier: Tier, g: int) -> PoolEvents | None:
    """What to give a pool; nothing where nobody listens."""
    return None if log is None else PoolEvents(log, tier, g)
