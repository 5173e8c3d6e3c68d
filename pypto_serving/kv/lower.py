"""LowerTier: what the engine core knows of one tier below the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from pypto_serving.kv.events import EventLog, pool_events
from pypto_serving.kv.pool import BlockPool
from pypto_serving.kv.rate import Rate
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.stats import TierStats
from pypto_serving.types.tier import KEY_BYTES, TierConfig, TierInventory
from pypto_serving.types.tokens import unpack_ids

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 60.0

GroupKey = tuple[int, bytes]
"""A block by group and key."""


@dataclass(slots=True)
class TierCounters:
    """Totals since the start; see TierStats."""

    hit_tokens: int = 0
    loaded_blocks: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    stored_blocks: int = 0
    stored_bytes: int = 0
    store_s: float = 0.0
    failed_blocks: int = 0
    lost_blocks: int = 0
    refused_fills: int = 0
    saved_s: float = 0.0


class LowerTier:
    """The pools of one tier, one per group, what waits to be stored there, and how fast it was. Changed by TierManager.

    Slot i of a group is block i + 1 of its pool. A store that fails is left alone for a second, then two, up to a
    minute. Loads that took `spent_s` spared the computing of `spared_tokens`, as far as `saved_s` does not count them
    yet. A tier is `stuck` while a transfer takes too long, and `clearing` until its store has forgotten all.
    """

    def __init__(
        self, config: TierConfig, groups: tuple[KVCacheGroupSpec, ...], events: EventLog | None = None
    ) -> None:
        self.config = config
        self._events = events
        self.groups = groups
        self.load_rate = Rate()
        self.counters = TierCounters()
        self.spared_tokens = self.spent_s = 0.0
        self.backlog: OrderedDict[GroupKey, None] = OrderedDict()
        self.storing: set[GroupKey] = set()
        self.storing_bytes = self.loading_bytes = 0
        self.num_stores = 0
        self.retry_s = 0.0
        self.stuck = self.clearing = False
        self.pools: list[BlockPool] = []
        self._num_evicted = 0
        self._retry_after_s = FIRST_RETRY_S
        self.forget_all()

    def forget_all(self) -> None:
        """Hold nothing, be writable, and know of nothing on its way."""
        self._num_evicted += sum(pool.num_evicted for pool in self.pools)
        tier, events = self.config.tier, self._events
        if events is not None:
            events.cleared(tier)
        slots = enumerate(self.config.num_slots)
        self.pools = [BlockPool(max(1, count) + 1, pool_events(events, tier, g)) for g, count in slots]
        self.writable, self.shared, self.reason = True, False, ""
        self.backlog.clear()
        self.stop_transfers()

    def stop_transfers(self) -> None:
        """Nothing is on its way any more."""
        self.stuck = False
        self.storing.clear()
        self.storing_bytes = self.loading_bytes = self.num_stores = 0

    def open(self, inventory: TierInventory) -> None:
        """Take over what a store says it holds."""
        self.forget_all()
        self.writable, self.shared, self.reason = inventory.writable, inventory.shared, inventory.reason
        groups, slots = unpack_ids(inventory.groups), unpack_ids(inventory.slots) + 1
        keys = inventory.keys
        for g, pool in enumerate(self.pools):
            mine = (groups == g).nonzero()[0]
            held = [keys[i : i + KEY_BYTES] for i in (mine * KEY_BYTES).tolist()]
            pool.fill(slots[mine].tolist(), held)

    def find(self, g: int, key: bytes) -> int | None:
        """The pool's block that holds `key`."""
        return self.pools[g].find(key)

    def learn(self, found: Sequence[GroupKey]) -> None:
        """Others have stored these."""
        for g, key in found:
            pool = self.pools[g]
            if pool.find(key) is None and pool.num_free:
                block_ids = pool.allocate(1)
                pool.publish(block_ids[0], key)
                pool.free(block_ids)

    def put_off(self, block: GroupKey, at_most: int) -> None:
        """Note a block that is to be stored, for so many at most: of more, the first are on the device no longer."""
        self.backlog[block] = None
        if len(self.backlog) > at_most:
            self.backlog.popitem(last=False)
            self.counters.lost_blocks += 1

    def failed(self, now_s: float) -> None:
        """Nothing of a job could be stored."""
        self.retry_s = now_s + self._retry_after_s
        self._retry_after_s = min(2 * self._retry_after_s, LAST_RETRY_S)

    def succeeded(self) -> None:
        self._retry_after_s = FIRST_RETRY_S

    def accepts(self, now_s: float) -> bool:
        """Whether blocks may be stored here now."""
        return self.writable and not self.stuck and now_s >= self.retry_s

    def stats(self) -> TierStats:
        """One snapshot."""
        counters = self.counters
        return TierStats(
            tier=self.config.tier,
            writable=self.writable,
            num_blocks=sum(self.config.num_slots),
            held_blocks=sum(pool.num_published for pool in self.pools),
            queued_bytes=self.loading_bytes + self.storing_bytes,
            backlog_blocks=len(self.backlog),
            hit_tokens=counters.hit_tokens,
            loaded_blocks=counters.loaded_blocks,
            loaded_bytes=counters.loaded_bytes,
            load_s=counters.load_s,
            stored_blocks=counters.stored_blocks,
            stored_bytes=counters.stored_bytes,
            store_s=counters.store_s,
            evicted_blocks=self._num_evicted + sum(pool.num_evicted for pool in self.pools),
            failed_blocks=counters.failed_blocks,
            lost_blocks=counters.lost_blocks,
            refused_fills=counters.refused_fills,
            saved_s=counters.saved_s,
        )
