"""BlockTable: the blocks of one request in one group; how the table grows, and when its blocks are freed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import KVGroup
from pypto_serving.kv.keys import Keys
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.transfers import Wanted


class BlockTable:
    """The blocks of one request in one group. Changed by the KVCacheManager alone.

    - `keys[i]` names block i, `blocks[i]` is its id: the null block before `first`, where it was freed or not needed.
    - `capacity`: the number of tokens that fit.
    - `due`: at this many committed tokens, more than a run of blocks can be freed.
    - `resume_blocks`: the blocks, of any request, that resuming at `SequenceState.resume_point` needs. A window or
      state holds one reference to each, besides those of the table.
    """

    __slots__ = ("blocks", "capacity", "due", "first", "group", "keys", "resume_blocks")

    def __init__(self, group: KVGroup, keys: Keys) -> None:
        self.group = group
        self.keys = keys
        self.clear()

    def clear(self) -> None:
        """Forget all blocks; the caller has freed them."""
        self.blocks: list[int] = []
        self.resume_blocks: list[int] = []
        self.capacity = 0
        self._set_first(0)

    def _set_first(self, first: int) -> None:
        """Set the first block that is not freed."""
        self.first = first
        self.due = self.group.passed_at(first + self.group.run)

    def missing(self, num_tokens: int) -> int:
        """Return how many more blocks the table needs to hold `num_tokens` tokens."""
        return self.group.missing(self.capacity, num_tokens)

    def live(self) -> list[int]:
        """Return the blocks that are not freed."""
        return self.blocks[self.first :]

    def find_needed(self, num_tokens: int) -> list[int | None]:
        """Return the blocks on the device that resuming at `num_tokens` needs, None for each that is missing."""
        find, keys = self.group.pool.find, self.keys
        return [find(keys[i]) for i in self.group.needed(num_tokens)]

    def cached(self, num_tokens: int) -> list[int]:
        """Return the table that a match of `num_tokens` gives a request without blocks, null before needed blocks."""
        if num_tokens == 0 or self.blocks:
            return []
        found = self.find_needed(num_tokens)
        name = self.group.spec.name
        assert None not in found, f"the match of {num_tokens} tokens no longer holds in group {name}"
        return [NULL_BLOCK] * self.group.needed(num_tokens).start + [block for block in found if block is not None]

    def start(self, cached: list[int]) -> None:
        """Begin the table with cached blocks."""
        self._set_first(cached.count(NULL_BLOCK))
        self.group.pool.share(cached[self.first :])
        self.blocks += cached
        self.capacity = len(cached) * self.group.block_size

    def grow(self, count: int) -> list[int]:
        """Append `count` fresh blocks to the table and return them."""
        added = self.group.pool.allocate(count)
        self.blocks += added
        self.capacity += count * self.group.block_size
        return added

    def fill(self, num_tokens: int, found: Sequence[int | None]) -> list[Wanted]:
        """Begin the table with the `found` blocks of `num_tokens` tokens and fresh ones for those missing.

        Return the fresh ones.
        """
        pool, needed = self.group.pool, self.group.needed(num_tokens)
        pool.share(block for block in found if block is not None)
        fresh = iter(pool.allocate(found.count(None)))
        blocks = [next(fresh) if block is None else block for block in found]
        self.blocks = [NULL_BLOCK] * needed.start + blocks
        self.capacity = len(self.blocks) * self.group.block_size
        self._set_first(needed.start)
        missing = (i for i, block in zip(needed, found, strict=True) if block is None)
        return [Wanted(self.group, self.blocks[i], self.keys[i]) for i in missing]

    def free_passed(self, num_tokens: int) -> None:
        """Free the blocks that are not needed at `num_tokens` committed tokens."""
        first, stop, blocks = self.first, self.group.first_needed(num_tokens), self.blocks
        if first < stop:
            self.group.pool.free(blocks[first:stop])
            blocks[first:stop] = [NULL_BLOCK] * (stop - first)
            self._set_first(stop)

    def resume_blocks_at(self, position: int) -> list[int]:
        """Return the blocks on the device, of any request, that resuming at `position` needs."""
        return [block for block in self.find_needed(position) if block is not None]

    def hold_resume_blocks(self, position: int) -> None:
        """Hold the resume blocks of `position` instead of those held before."""
        blocks = self.resume_blocks_at(position)
        self.group.pool.share(blocks)
        self.group.pool.free(self.resume_blocks)
        self.resume_blocks = blocks

    def describe(self, i: int, tokens: array[int], salted: bool, events: EventLog) -> None:
        """Describe block i to the events, if a tier holds it and nobody has described it."""
        keys, size, g = self.keys, self.group.block_size, self.group.index
        if events.lacks(g, keys[i]):
            content = tokens[i * size : (i + 1) * size].tobytes()
            events.describe(g, keys[i], (keys[i - 1] if i else b"", content, salted))
