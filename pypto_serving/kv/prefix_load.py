"""PrefixLoader: decides which prefix of a waiting request is loaded from lower tiers."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pypto_serving.kv.block_table import SequenceState
from pypto_serving.kv.group import GroupKey, ResumePoints
from pypto_serving.kv.lower_tier import LowerTier, fastest
from pypto_serving.kv.prefix_lookup import longest_prefix, on_device_or_in
from pypto_serving.kv.tiers import TierManager


class PrefixLoad(enum.Enum):
    """COMPUTE: there is nothing to load. BEGUN: wait for transfers. LATER: loading pays, and can begin after others."""

    COMPUTE = "compute"
    BEGUN = "begun"
    LATER = "later"


class PrefixLoader:
    """A part of the KVCacheManager, without state of its own: gives a request blocks to load into."""

    def __init__(self, tiers: TierManager, points: ResumePoints) -> None:
        self._tiers = tiers.tiers
        self._transfers = tiers.transfers
        self._promotions = tiers.promotions
        self._points = points

    def load_prefix(
        self, request_id: str, sequence: SequenceState, num_tokens: int, matched: int, may_begin: bool
    ) -> PrefixLoad:
        """Begin to load what lower tiers hold of `num_tokens` tokens beyond `matched`, if that pays.

        First, tiers that others fill too are asked once what they hold. Then the prefix that all tiers hold together is
        considered, then the one that all but the slowest hold, and so on. What would begin a transfer, or wait for one,
        is tried later if not `may_begin`. Such a prefix

        1. is no longer than the match, and neither are those after it: compute;
        2. was refused just before, and the slowest tier adds nothing to it: go on to the next;
        3. is being loaded in part for another request: wait for that;
        4. is expected to be loaded faster than computed: load it, or compute if its blocks do not fit (see `_fill`);
        5. is not: it is refused.
        """
        if not sequence.asked:
            unknown = list(self._unknown(sequence, num_tokens)) if self._promotions.has_shared else []
            if unknown and not may_begin:
                return PrefixLoad.LATER
            sequence.asked = True
            if unknown:
                self._promotions.ask(request_id, unknown)
                return PrefixLoad.BEGUN
        refused = matched
        for depth in range(len(self._tiers), 0, -1):
            fetched = longest_prefix(sequence, num_tokens - 1, on_device_or_in(self._tiers[:depth]))
            if fetched <= matched:
                return PrefixLoad.COMPUTE
            if fetched == refused:
                continue
            lacking = self._lacking(sequence, fetched)
            other = self._promotions.fill_of(lacking)
            if other is None and not self._promotions.pays(fetched - matched, self._bytes_by_tier(lacking)):
                refused = fetched
            elif not may_begin:
                return PrefixLoad.LATER
            elif other is not None:
                self._promotions.waits[request_id] = other
                return PrefixLoad.BEGUN
            else:
                return self._fill(request_id, sequence, fetched, fetched - matched)
        return PrefixLoad.COMPUTE

    def _lacking(self, sequence: SequenceState, num_tokens: int) -> list[GroupKey]:
        """Return the blocks that the device lacks to resume at `num_tokens`."""
        return [
            (table.group, table.keys[i])
            for table in sequence.tables
            for i in table.group.needed(num_tokens)
            if table.group.pool.find(table.keys[i]) is None
        ]

    def _unknown(self, sequence: SequenceState, num_tokens: int) -> Iterator[GroupKey]:
        """Yield the blocks within `num_tokens` known tokens that resuming needs and that no tier is known to hold.

        Any resume point may be a checkpoint of another replica: where its prompts and turns ended is not known.
        """
        end = self._points.last(max(0, num_tokens - max(1, self._points.lag)))
        find_in = on_device_or_in(self._tiers)
        for table in (*sequence.histories, *sequence.recent):
            find = find_in(table.group)
            for i in table.group.useful(0, end):
                if find(table.keys[i]) is None:
                    yield table.group, table.keys[i]

    def _bytes_by_tier(self, blocks: Iterable[GroupKey]) -> Counter[LowerTier]:
        """Add up the bytes that would be loaded from each tier."""
        sizes: Counter[LowerTier] = Counter()
        for group, key in blocks:
            tier = fastest(self._tiers, group, key)
            if tier is not None:
                sizes[tier] += group.block_bytes
        return sizes

    def _fill(self, request_id: str, sequence: SequenceState, num_tokens: int, num_spared: int) -> PrefixLoad:
        """Give a request the blocks of its first `num_tokens` tokens and load the missing ones, if they fit.

        That spares computing `num_spared` tokens. Loads that hang keep their blocks, so beside other loads a fill
        leaves room for one sequence of the longest length, or waits for the other fills.
        """
        found = [table.find_needed(num_tokens) for table in sequence.tables]
        for table, blocks in zip(sequence.tables, found, strict=True):
            pool = table.group.pool
            if sum(1 for block_id in blocks if block_id is None or pool.is_free(block_id)) > pool.num_free:
                return PrefixLoad.COMPUTE
        if self._transfers.num_loads and self._overfills(sequence, found):
            return PrefixLoad.LATER if self._promotions.waits else PrefixLoad.COMPUTE
        filled = zip(sequence.tables, found, strict=True)
        wanted = [missing for table, blocks in filled for missing in table.fill(num_tokens, blocks)]
        sequence.set_capacity()
        sequence.filled = sequence.computed = sequence.committed = num_tokens
        sequence.origins.update(self._promotions.load(request_id, wanted, num_spared))
        return PrefixLoad.BEGUN

    def _overfills(self, sequence: SequenceState, found: Iterable[Sequence[int | None]]) -> bool:
        """Return whether loading the blocks not `found` would leave too little room in a group."""
        return any(
            blocks.count(None) > self._transfers.block_budget(table.group)
            for table, blocks in zip(sequence.tables, found, strict=True)
        )
