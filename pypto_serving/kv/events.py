"""EventLog: owner of the events that tell routers which blocks each tier caches."""

from __future__ import annotations

from pypto_serving.types.tier import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, Tier

Content = tuple[bytes, bytes, bool]
"""Content of a block: key of its parent, token ids as int32 bytes, whether it is salted."""


class HeldBlock:
    """A block held by `tiers`; `content` is None until a request with its tokens describes it."""

    __slots__ = ("content", "tiers")

    def __init__(self) -> None:
        self.tiers: list[Tier] = []
        self.content: Content | None = None


class EventLog:
    """Owns the events since the last `take`, and the content of each block that some tier holds.

    Pools report the keys that they add and remove; the KVCacheManager describes the blocks. A block has no events
    before it is described; `num_unknown` blocks have no description yet.
    """

    def __init__(self) -> None:
        self._events: list[KVEvent] = []
        self._blocks: dict[tuple[int, bytes], HeldBlock] = {}
        self._let_go: list[tuple[int, bytes]] = []
        self.num_unknown = 0

    def held(self, tier: Tier, g: int, key: bytes) -> None:
        """Record that a tier holds another block."""
        block = self._blocks.get((g, key))
        if block is None:
            block = self._blocks[g, key] = HeldBlock()
            self.num_unknown += 1
        block.tiers.append(tier)
        if block.content is not None:
            self._events.append(BlockStored(tier, g, key, *block.content))

    def gone(self, tier: Tier, g: int, key: bytes) -> None:
        """Record that a tier no longer holds a block."""
        block = self._blocks[g, key]
        block.tiers.remove(tier)
        if block.content is not None:
            self._events.append(BlockRemoved(tier, g, key))
        if not block.tiers:
            self._let_go.append((g, key))

    def cleared(self, tier: Tier) -> None:
        """Record that a tier forgot all blocks. Blocks that it holds again before the next `take` stay described."""
        for pair, block in self._blocks.items():
            if tier in block.tiers:
                block.tiers.remove(tier)
                if not block.tiers:
                    self._let_go.append(pair)
        self._events.append(AllBlocksCleared(tier))

    def holds(self, g: int, key: bytes) -> bool:
        """Return whether a tier holds this block."""
        return (g, key) in self._blocks

    def lacks(self, g: int, key: bytes) -> bool:
        """Return whether a tier holds this block and it has no description yet."""
        block = self._blocks.get((g, key))
        return block is not None and block.content is None

    def describe(self, g: int, key: bytes, content: Content) -> None:
        """Set the content of a block that `lacks` it, and add an event for each tier that holds the block."""
        block = self._blocks[g, key]
        block.content = content
        self.num_unknown -= 1
        self._events += [BlockStored(tier, g, key, *content) for tier in block.tiers]

    def take(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        for pair in self._let_go:
            block = self._blocks.get(pair)
            if block is not None and not block.tiers:
                del self._blocks[pair]
                self.num_unknown -= block.content is None
        self._let_go.clear()
        events, self._events = self._events, []
        return events
