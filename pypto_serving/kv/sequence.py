"""SequenceState: the block tables of one request in all groups; whether they can grow, and how far it is committed."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

from pypto_serving.kv.block_table import BlockTable
from pypto_serving.kv.group import GroupKey, KVGroup
from pypto_serving.kv.keys import KeyRule
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.resume_points import ResumePoints
from pypto_serving.types.tier import Tier

BlockIds = Sequence[list[int]]
"""Block ids per group, in order of position."""
NOTHING: BlockIds = ()


class SequenceState:
    """The blocks of one request in all groups. Changed by the KVCacheManager alone.

    - `computed`: the number of tokens that are certainly computed.
    - `committed`: the number of those that `Committer` took into account; their blocks depend on known tokens only.
      Their blocks are published up to the last resume point. Of those not needed to resume here, at most a run is not
      freed.
    - `capacity`: the number of tokens that fit the tables of all groups.
    - `due`: the number of computed tokens from which a commit has work to do: a resume point, or blocks to free.
    - `resume_point`: the last committed resume point. The tables hold its resume blocks.
    - `filled`: the number of tokens that are loaded, or being loaded, into the tables before the request runs.
    - `origins`: the tiers from which blocks were loaded for this request at any time.
    - `asked`: shared tiers were asked for its blocks.
    - `salted`: its blocks are not reported in KV events.

    `histories` are the tables of groups that keep their history, `recent` those of windows and states.
    """

    __slots__ = (
        "asked",
        "capacity",
        "chain",
        "committed",
        "computed",
        "due",
        "filled",
        "histories",
        "origins",
        "points",
        "recent",
        "resume_point",
        "salted",
        "tables",
    )

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
        """Compute the keys that `tokens`, known from position 0 on, allow."""
        with memoryview(tokens) as view, view.cast("B") as data:
            self.chain.extend(data)

    # Growth.

    def grow(self, num_tokens: int) -> BlockIds | None:
        """Append fresh blocks until `num_tokens` tokens fit. Return them; if a pool lacks some, append none: None.

        First free the blocks of windows and states that are not needed any more: while a sequence decodes, only here.
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
        """Do what `grow` does for a request without blocks that has `matched` cached tokens. Return its tables."""
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

    def fits(self, matched: int, num_tokens: int, step_tokens: int, spare: float, reserved: Iterable[int]) -> bool:
        """Return whether a request with `matched` cached tokens may grow to `num_tokens` with the blocks free now.

        Of its tokens, `step_tokens` are computed and not committed. `reserved` blocks of each group, and the share
        `spare` of each pool, are left to others.
        """
        for table, others in zip(self.tables, reserved, strict=True):
            pool = table.group.pool
            cached = table.cached(matched)
            in_use = sum(1 for block in cached if block != NULL_BLOCK and not pool.is_free(block))
            in_use += len(table.blocks) - table.first
            needed = table.group.live_blocks(num_tokens, step_tokens) - in_use
            if needed + others + int(pool.num_blocks * spare) > pool.num_free:
                return False
        return True

    def free_passed(self, num_tokens: int) -> None:
        """Note that `num_tokens` are committed, and free the blocks that are not needed to resume there."""
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

    # Origins.

    def sources(self, num_tokens: int) -> Counter[Tier]:
        """Return how many of the first tokens came from which tier, by the blocks of a group that keeps history."""
        if not self.origins:
            return Counter({"device": num_tokens})
        table = (*self.histories, *self.recent)[0]
        size = table.group.block_size
        keys = map(table.keys.__getitem__, range(num_tokens // size))
        sources = Counter(self.origins.get((table.group, key), "device") for key in keys)
        return Counter({tier: count * size for tier, count in sources.items()})

    def forget_missing_origins(self) -> None:
        """Forget the tiers of blocks that did not arrive, since they are computed instead."""
        origins = self.origins.items()
        self.origins = {(group, key): tier for (group, key), tier in origins if group.pool.find(key) is not None}
