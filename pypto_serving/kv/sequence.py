"""SequenceState: what the KVCacheManager knows of one request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import Find, GroupKey, KVGroup
from pypto_serving.kv.keys import KeyRule, Keys
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.resume_points import ResumePoints
from pypto_serving.kv.transfers import Wanted
from pypto_serving.types.tier import Tier

FindIn = Callable[[KVGroup], Find]


def on_device(group: KVGroup) -> Find:
    """Find blocks of a group on the device."""
    return group.pool.find


class SequencePart:
    """The blocks of one request in one group.

    `keys[i]` names block i, `table[i]` is its id: the null block before `first`, where it was freed or is not needed.
    At `due` committed tokens, more than a run of blocks can be freed. `resume_blocks` are those, of any request,
    that resuming at `SequenceState.resume_point` needs; a window or state holds one more reference to each.
    """

    __slots__ = ("capacity", "due", "first", "group", "keys", "resume_blocks", "table")

    def __init__(self, group: KVGroup, keys: Keys) -> None:
        self.group = group
        self.keys = keys
        self.clear()

    def clear(self) -> None:
        """Forget all blocks; the caller has freed them."""
        self.table: list[int] = []
        self.resume_blocks: list[int] = []
        self.capacity = 0
        self._begin(0)

    def _begin(self, first: int) -> None:
        """Note the first block that is not freed."""
        self.first = first
        self.due = self.group.passed_at(first + self.group.run)

    def missing(self, num_tokens: int) -> int:
        """Return how many more blocks the table has to get to hold `num_tokens` tokens."""
        return self.group.missing(self.capacity, num_tokens)

    def live(self) -> list[int]:
        """Return the part of the table that is not freed."""
        return self.table[self.first :]

    def found(self, num_tokens: int) -> list[int | None]:
        """Return the blocks on the device that resuming at `num_tokens` needs, None for each that is missing."""
        find, keys = self.group.pool.find, self.keys
        return [find(keys[i]) for i in self.group.needed(num_tokens)]

    def cached(self, num_tokens: int) -> list[int]:
        """Return the table that a match of `num_tokens` gives a request without blocks: null before what is needed."""
        if num_tokens == 0 or self.table:
            return []
        blocks = self.found(num_tokens)
        name = self.group.spec.name
        assert None not in blocks, f"the match of {num_tokens} tokens no longer holds in group {name}"
        return [NULL_BLOCK] * self.group.needed(num_tokens).start + [b for b in blocks if b is not None]

    def start(self, cached: list[int]) -> None:
        """Begin the table with cached blocks."""
        self._begin(cached.count(NULL_BLOCK))
        self.group.pool.share(cached[self.first :])
        self.table += cached
        self.capacity = len(cached) * self.group.block_size

    def grow(self, count: int) -> list[int]:
        """Append fresh blocks to the table. Returns them."""
        added = self.group.pool.allocate(count)
        self.table += added
        self.capacity += count * self.group.block_size
        return added

    def fill(self, num_tokens: int, found: Sequence[int | None]) -> list[Wanted]:
        """Take the `found` blocks of `num_tokens` tokens, and fresh ones for those missing. Returns the fresh."""
        pool, needed = self.group.pool, self.group.needed(num_tokens)
        pool.share(block_id for block_id in found if block_id is not None)
        fresh = iter(pool.allocate(found.count(None)))
        blocks = [next(fresh) if block_id is None else block_id for block_id in found]
        self.table = [NULL_BLOCK] * needed.start + blocks
        self.capacity = len(self.table) * self.group.block_size
        self._begin(needed.start)
        missing = (i for i, block_id in zip(needed, found, strict=True) if block_id is None)
        return [Wanted(self.group, self.table[i], self.keys[i]) for i in missing]

    def free_passed(self, num_tokens: int) -> None:
        """Free the blocks that are not needed at `num_tokens` settled tokens."""
        first, stop, table = self.first, self.group.first_needed(num_tokens), self.table
        if first < stop:
            self.group.pool.free(table[first:stop])
            table[first:stop] = [NULL_BLOCK] * (stop - first)
            self._begin(stop)

    def resume_blocks_at(self, position: int) -> list[int]:
        """Return the blocks on the device, this request's or others', that resuming at `position` needs."""
        return [block_id for block_id in self.found(position) if block_id is not None]

    def hold(self, position: int) -> None:
        """Hold the tail of `position` instead of the one held before."""
        tail = self.resume_blocks_at(position)
        self.group.pool.share(tail)
        self.group.pool.free(self.resume_blocks)
        self.resume_blocks = tail

    def describe(self, i: int, tokens: array[int], salted: bool, events: EventLog) -> None:
        """Describe block i to the events, if a tier holds it and nobody has described it."""
        keys, size, g = self.keys, self.group.block_size, self.group.index
        if events.lacks(g, keys[i]):
            content = tokens[i * size : (i + 1) * size].tobytes()
            events.describe(g, keys[i], (keys[i - 1] if i else b"", content, salted))


class SequenceState:
    """The blocks of one request in all groups. Changed by the KVCacheManager alone.

    - `computed`: the number of tokens that are certainly computed.
    - `committed`: the number of those that were taken into account, and whose blocks depend on known tokens only. Their
      blocks are published up to the last resume point. Of those not needed to resume here, at most a run is not freed.
    - `capacity`: the number of tokens that fit the reserved blocks.
    - `due`: the number of computed tokens from which a commit has work to do: a resume point, or blocks to free.
    - `held`: the last settled resume point. The parts hold its tails.
    - `filled`: the number of tokens that are loaded, or being loaded, into the tables before the request runs.
    - `origins`: the tiers from which blocks were loaded for this request at any time.
    - `asked`: shared tiers were asked for its blocks.
    - `salted`: its blocks are not reported in KV events.

    `histories` are the parts that keep their history, `recent` those of windows and states.
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
        "parts",
        "points",
        "recent",
        "resume_point",
        "salted",
    )

    def __init__(
        self, groups: Sequence[KVGroup], points: ResumePoints, rule: KeyRule, fingerprint: bytes, cache_salt: str
    ) -> None:
        self.points = points
        self.chain, keys = rule.keys(fingerprint, cache_salt)
        self.parts = tuple(map(SequencePart, groups, keys))
        self.histories = tuple(part for part in self.parts if part.group.keeps_history)
        self.recent = tuple(part for part in self.parts if not part.group.keeps_history)
        self.salted = bool(cache_salt)
        self.asked = False
        self.origins: dict[GroupKey, Tier] = {}
        self._begin()

    def _begin(self) -> None:
        """Note that there are no blocks."""
        self.capacity = self.computed = self.committed = self.resume_point = self.filled = 0
        self.due: float = 0

    def clear(self) -> None:
        """Forget all blocks; the caller has freed them."""
        self._begin()
        for part in self.parts:
            part.clear()

    def extend_keys(self, tokens: array[int]) -> None:
        """Compute the keys that `tokens`, known from position 0 on, allow."""
        with memoryview(tokens) as view, view.cast("B") as data:
            self.chain.extend(data)

    def longest(self, limit: int, find_in: FindIn) -> int:
        """Return the largest n <= `limit` that every group accepts: each shrinks the candidate until none objects.

        A group that keeps its history accepts every resume point before the one that it returned, so it is asked once.
        """
        candidate, agreed = limit, -1
        for part in self.histories:
            candidate = part.group.accepted(part.keys, candidate, find_in(part.group))
        while candidate and candidate != agreed:
            agreed = candidate
            for part in self.recent:
                candidate = part.group.accepted(part.keys, candidate, find_in(part.group))
        return candidate

    def sources(self, num_tokens: int) -> Counter[Tier]:
        """Return how many of the first tokens came from which tier, by the blocks of a group that keeps history."""
        if not self.origins:
            return Counter({"device": num_tokens})
        part = (*self.histories, *self.recent)[0]
        size = part.group.block_size
        keys = map(part.keys.__getitem__, range(num_tokens // size))
        sources = Counter(self.origins.get((part.group, key), "device") for key in keys)
        return Counter({tier: count * size for tier, count in sources.items()})

    def forget_missing_origins(self) -> None:
        """Forget the tiers of blocks that did not arrive: whoever computes them gets the credit."""
        origins = self.origins.items()
        self.origins = {(group, key): tier for (group, key), tier in origins if group.pool.find(key) is not None}

    def free_passed(self, num_tokens: int) -> None:
        """Settle `num_tokens` and free the blocks that are not needed to resume there."""
        due: float = self.points.last(num_tokens) + self.points.step
        for part in self.recent:
            part.free_passed(num_tokens)
            if part.due < due:
                due = part.due
        self.committed, self.due = num_tokens, due

    def tables(self) -> tuple[list[int], ...]:
        """Return a copy of the block table of each group."""
        return tuple([list(part.table) for part in self.parts])

    def set_capacity(self) -> None:
        """Note how many tokens the tables hold in every group."""
        self.capacity = min([part.capacity for part in self.parts])
