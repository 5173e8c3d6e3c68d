"""The blocks of one request: BlockTable for one group, SequenceState for all groups."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import GroupKey, KVGroup, ResumePoints
from pypto_serving.kv.keys import KeyRule, Keys
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.types.tier import Tier


class BlockTable:
    """The blocks of one request in one group. Changed only by the KVCacheManager.

    - `keys[i]`, `blocks[i]`: key and id of block i. Blocks before `first` were freed or not needed: the null block.
    - `capacity`: the number of tokens that fit.
    - `due`: at this many committed tokens, more than a run of blocks can be freed.
    - `resume_blocks`: the blocks, of any request, that resuming at `SequenceState.resume_point` needs. A window or
      state holds one reference to each, in addition to the table's.
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
        """Set the first block that has not been freed."""
        self.first = first
        self.due = self.group.passed_at(first + self.group.run)

    def missing(self, num_tokens: int) -> int:
        """Count the further blocks that the table needs to hold `num_tokens` tokens."""
        return self.group.missing(self.capacity, num_tokens)

    def live(self) -> list[int]:
        """Return the blocks that have not been freed."""
        return self.blocks[self.first :]

    def find_needed(self, num_tokens: int) -> list[int | None]:
        """Return the device blocks that resuming at `num_tokens` needs, with None for each missing one."""
        find, keys = self.group.pool.find, self.keys
        return [find(keys[i]) for i in self.group.needed(num_tokens)]

    def cached(self, num_tokens: int) -> list[int]:
        """Return the first table of a request with a match of `num_tokens`; null blocks precede the needed ones."""
        if num_tokens == 0 or self.blocks:
            return []
        found = self.find_needed(num_tokens)
        name = self.group.spec.name
        assert None not in found, f"the match of {num_tokens} tokens no longer holds in group {name}"
        return [NULL_BLOCK] * self.group.needed(num_tokens).start + [block for block in found if block is not None]

    def start(self, cached: list[int]) -> None:
        """Fill the empty table with cached blocks."""
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

    def fill(self, num_tokens: int, found: Sequence[int | None]) -> list[tuple[int, bytes]]:
        """Fill the empty table with the `found` blocks of `num_tokens` tokens, and fresh blocks for missing ones.

        Return each fresh block with the key of the content to load.
        """
        pool, needed = self.group.pool, self.group.needed(num_tokens)
        pool.share(block for block in found if block is not None)
        fresh = iter(pool.allocate(found.count(None)))
        blocks = [next(fresh) if block is None else block for block in found]
        self.blocks = [NULL_BLOCK] * needed.start + blocks
        self.capacity = len(self.blocks) * self.group.block_size
        self._set_first(needed.start)
        return [(self.blocks[i], self.keys[i]) for i, block in zip(needed, found, strict=True) if block is None]

    def free_passed(self, num_tokens: int) -> None:
        """Free the blocks that are not needed at `num_tokens` committed tokens."""
        first, stop, blocks = self.first, self.group.first_needed(num_tokens), self.blocks
        if first < stop:
            self.group.pool.free(blocks[first:stop])
            blocks[first:stop] = [NULL_BLOCK] * (stop - first)
            self._set_first(stop)

    def resume_blocks_at(self, position: int) -> list[int]:
        """Return the device blocks, of any request, that resuming at `position` needs."""
        return [block for block in self.find_needed(position) if block is not None]

    def hold_resume_blocks(self, position: int) -> None:
        """Hold the resume blocks of `position`, and release the ones held before."""
        blocks = self.resume_blocks_at(position)
        self.group.pool.share(blocks)
        self.group.pool.free(self.resume_blocks)
        self.resume_blocks = blocks

    def describe(self, i: int, tokens: array[int], salted: bool, events: EventLog) -> None:
        """Describe block i to the EventLog, if a tier holds it and it has no description yet."""
        keys, size, g = self.keys, self.group.block_size, self.group.index
        if events.lacks(g, keys[i]):
            content = tokens[i * size : (i + 1) * size].tobytes()
            events.describe(g, keys[i], (keys[i - 1] if i else b"", content, salted))


BlockIds = Sequence[list[int]]
"""Block ids per group, in order of position."""
NOTHING: BlockIds = ()


class SequenceState:
    """The blocks of one request in all groups. Changed only by the KVCacheManager.

    - `computed`: the number of tokens that are certainly computed.
    - `committed`: the number of committed tokens, whose blocks depend only on known tokens.
      Their blocks are published up to the last resume point. Blocks not needed to resume here are freed, except for at
      most one run.
    - `capacity`: the number of tokens that fit the tables of all groups.
    - `due`: the number of computed tokens at which a commit has work to do: a resume point, or blocks to free.
    - `resume_point`: the last committed resume point. The tables hold its resume blocks.
    - `filled`: the number of tokens that are loaded, or being loaded, into the tables before the request runs.
    - `origins`: all tiers from which blocks were ever loaded for this request.
    - `asked`: shared tiers were asked for its blocks.
    - `salted`: its blocks are not reported in KV events.

    `histories` are the tables of groups that keep their history, `recent` those of windows and states.
    """

    def __init__(
        self, groups: Sequence[KVGroup], points: ResumePoints, rule: KeyRule, fingerprint: bytes, cache_salt: str
    ) -> None:
        self.points = points
        self.chain, keys = rule.keys(fingerprint, cache_salt)
        self.tables = tuple(map(BlockTable, groups, keys))
        self.histories = tuple(table for table in self.tables if table.group.keeps_history)
        self.recent = tuple(table for table in self.tables if not table.group.keeps_history)
        self.salted = bool(cache_salt)
        self.asked = False
        self.origins: dict[GroupKey, Tier] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all blocks; the caller has freed them."""
        self.capacity = self.computed = self.committed = self.resume_point = self.filled = 0
        self.due: float = 0
        for table in self.tables:
            table.clear()

    def extend_keys(self, tokens: array[int]) -> None:
        """Compute the keys of all blocks that `tokens`, from position 0 on, determine."""
        with memoryview(tokens) as view, view.cast("B") as data:
            self.chain.extend(data)

    # Growth.

    def grow(self, num_tokens: int) -> BlockIds | None:
        """Append fresh blocks until `num_tokens` tokens fit, and return them. If a pool has too few, return None.

        First free blocks of windows and states that are no longer needed; while a sequence decodes, only here.
        """
        committed = self.computed - self.points.lag
        if self.recent and committed > self.committed:
            self.free_passed(committed)
        growing = [(table, table.missing(num_tokens)) for table in self.tables if table.capacity < num_tokens]
        for table, count in growing:
            if count > table.group.pool.num_free:
                return None
        added: list[list[int]] = [[]] * len(self.tables)
        for table, count in growing:
            added[table.group.index] = table.grow(count)
        self.set_capacity()
        return added

    def start(self, num_tokens: int, matched: int) -> BlockIds | None:
        """Like `grow`, for a request without blocks that has `matched` cached tokens. Return its whole tables."""
        cached = [table.cached(matched) for table in self.tables]
        for table, blocks in zip(self.tables, cached, strict=True):
            pool = table.group.pool
            missing = table.group.missing(len(blocks) * table.group.block_size, num_tokens)
            if missing + sum(map(pool.is_free, blocks)) > pool.num_free:
                return None
        for table, blocks in zip(self.tables, cached, strict=True):
            table.start(blocks)
            table.grow(table.missing(num_tokens))
        self.computed = self.committed = matched
        self.set_capacity()
        return self.block_ids()

    def free_passed(self, num_tokens: int) -> None:
        """Record that `num_tokens` are committed, and free the blocks that are not needed to resume there."""
        due: float = self.points.last(num_tokens) + self.points.step
        for table in self.recent:
            table.free_passed(num_tokens)
            if table.due < due:
                due = table.due
        self.committed, self.due = num_tokens, due

    def block_ids(self) -> BlockIds:
        """Return a copy of the block table of each group."""
        return tuple([list(table.blocks) for table in self.tables])

    def set_capacity(self) -> None:
        """Set `capacity` from the tables."""
        self.capacity = min([table.capacity for table in self.tables])

    def lacking(self, num_tokens: int) -> list[GroupKey]:
        """Return the blocks that the device lacks to resume at `num_tokens`."""
        return [
            (table.group, table.keys[i])
            for table in self.tables
            for i in table.group.needed(num_tokens)
            if table.group.pool.find(table.keys[i]) is None
        ]
