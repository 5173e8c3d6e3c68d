"""Decide which device blocks are stored in lower tiers, and when."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence

from pypto_serving.kv.group import GroupKey, KVGroup
from pypto_serving.kv.lower_tier import ActiveTransfers, LowerTier, Moved, Transfer
from pypto_serving.types.tier import StorePolicy, TransferDone

MAX_STORES = 2
"""Limit of concurrent store jobs per tier."""
MAX_STORE_BYTES = 32 << 20
"""Limit of the bytes of one store job; a single block may exceed it."""
MAX_DEMOTING_BYTES = 256 << 20
"""A preempted request's blocks are stored at once only while fewer bytes than this are on their way to the tier."""
MAX_PINNED = 0.5
"""Largest share of the free device blocks that the stores of one plan may pin."""
EVICTION_MARGIN = 0.1
"""With policy `eviction`: store the blocks that are evicted next, up to this share of the device pool."""

BlockBudget = dict[KVGroup, int]
"""Number of further device blocks of each group that may be pinned."""


class Demotions:
    """The part of the TierManager that stores blocks; shares its `tiers` and `transfers`.

    A store pins its device blocks: it holds a reference to each, so none is evicted before the store ends.
    """

    def __init__(
        self, groups: Sequence[KVGroup], tiers: Sequence[LowerTier], policy: StorePolicy, transfers: ActiveTransfers
    ) -> None:
        self._groups = groups
        self._tiers = tiers
        self._policy = policy
        self._transfers = transfers
        self._coming_free: list[int] | None = None

    def forget_all(self) -> None:
        """Forget all stores, since the worker is gone."""
        self._coming_free = None

    def plan(self, now_s: float) -> None:
        """Begin to store device blocks that have become free, as far as the tiers keep up."""
        if not self._tiers:
            return
        self._coming_free = None
        for group in self._groups:
            spare = group.pool.num_free - int(group.pool.num_blocks * EVICTION_MARGIN)
            self._take_released(group, 0 if self._policy == "through" else max(0, spare))
        budget = {
            group: min(math.ceil(group.pool.num_free * MAX_PINNED), self._transfers.block_budget(group))
            for group in self._groups
        }
        for tier in self._tiers:
            while len(self._transfers.moving(tier, "store")) < MAX_STORES and tier.accepts(now_s):
                if not self._store(tier, tier.backlog, budget):
                    break

    def demote(self, blocks: Sequence[GroupKey], now_s: float) -> None:
        """Begin to store the blocks of a preempted request, because they are about to be evicted."""
        self._coming_free = None
        for tier in self._tiers:
            missing = OrderedDict.fromkeys(pair for pair in blocks if tier.find(*pair) is None)
            budget = {group: self._transfers.block_budget(group) for group in self._groups}
            while tier.accepts(now_s) and self._transfers.num_bytes(tier, "store") < MAX_DEMOTING_BYTES:
                if not self._store(tier, missing, budget):
                    break

    def coming_free(self) -> list[int]:
        """Count, per group, the blocks whose only references come from stores to tiers that are not stuck."""
        if self._coming_free is None:
            pins: dict[KVGroup, Counter[int]] = {group: Counter() for group in self._groups}
            for transfer in self._transfers:
                if transfer.kind == "store" and not transfer.tier.stuck:
                    for piece in transfer.moved:
                        pins[piece.group][piece.block] += 1
            self._coming_free = [
                sum(1 for block, count in pins[group].items() if group.pool.num_references(block) == count)
                for group in self._groups
            ]
        return self._coming_free

    def _take_released(self, group: KVGroup, left: int) -> None:
        """Take all but the last `left` released blocks. Queue each in tiers that lack it; touch it in others."""
        released = group.pool.released
        while len(released) > left:
            block_id, _ = released.popitem(last=False)
            key = group.pool.key(block_id)
            assert key is not None
            for tier in self._tiers:
                tier_block = tier.find(group, key)
                if tier_block is not None:
                    tier.pools[group].touch(tier_block)
                elif tier.writable and (group, key) not in tier.storing:
                    tier.put_off((group, key), at_most=sum(group.pool.num_blocks for group in self._groups))

    def _store(self, tier: LowerTier, backlog: OrderedDict[GroupKey, None], budget: BlockBudget) -> bool:
        """Begin one job with the first blocks of a backlog. Return False if there are none to store.

        Cases for the block at the front:

        1. Evicted from the device: count it as lost.
        2. In the tier, on its way there, or discarded: nothing to do.
        3. The job is full, the tier has no free slot, or no more blocks of the group may be pinned: end the job; the
           block stays at the front.
        4. Otherwise: add it to the job.
        """
        moved: list[Moved] = []
        left_bytes = MAX_STORE_BYTES
        while backlog:
            group, key = pair = next(iter(backlog))
            block = group.pool.find(key)
            tier.counters.lost_blocks += block is None
            if block is not None and tier.lacks(pair):
                if (moved and group.block_bytes > left_bytes) or not tier.pools[group].num_free or budget[group] <= 0:
                    break
                budget[group] -= not self._transfers.holds(group, block)
                group.pool.share([block])
                moved.append(Moved(group, block, tier.pools[group].allocate(1)[0], key))
                left_bytes -= group.block_bytes
            del backlog[pair]
        if moved:
            tier.storing.update((piece.group, piece.key) for piece in moved)
            self._transfers.begin("store", tier, moved)
        return bool(moved)

    def stored(self, transfer: Transfer, done: TransferDone, now_s: float) -> None:
        """Publish the stored blocks in the tier, and put failed ones back into its backlog."""
        tier, num_bytes = transfer.tier, 0
        for piece, ok in zip(transfer.moved, done.done, strict=True):
            group, block, tier_block, key = piece
            tier.storing.discard((group, key))
            num_bytes += group.block_bytes * ok
            pool = tier.pools[group]
            if not ok:
                tier.backlog[group, key] = None
                pool.make_new(tier_block)
            elif not transfer.void:
                if pool.is_new(tier_block):
                    tier.lacking.discard(group)
                pool.publish(tier_block, key)
            pool.free([tier_block])
            group.pool.free([block])
            group.pool.released.pop(block, None)
            if self._policy == "eviction":
                group.pool.touch(block, last=False)  # evict it next
        self._coming_free = None
        tier.writable &= done.writable
        for group in {piece.group for piece, ok in zip(transfer.moved, done.done, strict=True) if not ok}:
            tier.lacking.add(group)
            if tier.config.tier == "disk":  # a full disk still has room for slots that were used before
                tier.pools[group].use_new_last()
        tier.counters.stored(done, num_bytes)
        if any(done.done):
            tier.backoff.succeed()
        else:
            tier.backoff.fail(now_s)
