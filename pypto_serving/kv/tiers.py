"""TierManager: owner of the tiers below the device; decides which blocks are stored, loaded and forgotten there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pypto_serving.kv.demotion import Demotions
from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import GroupKey, KVGroup
from pypto_serving.kv.lower_tier import ActiveTransfers, LowerTier
from pypto_serving.kv.promotion import Promotions
from pypto_serving.types.request import TierStats
from pypto_serving.types.tier import (
    TIERS,
    StorePolicy,
    Tier,
    TierConfig,
    TierInventory,
    TransferDone,
)

CHECKED_BLOCKS = 1 << 16
"""Search only pools with at most this many published blocks for leaks, since requests wait during the search."""


class TierManager:
    """Owns the tiers below the device and their transfers; `promotions` and `demotions` are its two parts.

    Uses the device pools of `groups`, which the KVCacheManager owns: holds references to blocks while they are moved,
    and publishes them when they are filled. Reads no clock: times and speeds are arguments.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        configs: Iterable[TierConfig],
        policy: StorePolicy,
        longest_blocks: Sequence[int],
        timeout_s: float,
        events: EventLog | None,
    ) -> None:
        ordered = sorted(configs, key=lambda config: TIERS.index(config.tier))
        self.tiers = tuple(LowerTier(config, groups, events) for config in ordered)
        self.transfers = ActiveTransfers(groups, longest_blocks, timeout_s)
        self.promotions = Promotions(self.tiers, self.transfers)
        self.demotions = Demotions(groups, self.tiers, policy, self.transfers)

    def open(self, inventories: Iterable[TierInventory]) -> None:
        """Begin a new worker life with empty device pools. Host memory keeps its blocks, except moving ones."""
        self.transfers.forget_all()
        self.promotions.forget_all()
        self.demotions.forget_all()
        held = {inventory.tier: inventory for inventory in inventories}
        for tier in self.tiers:
            tier.stop_transfers()
            if tier.config.tier in held:
                tier.open(held[tier.config.tier])
            if tier.clearing:
                self._clear(tier)

    def take_done(self, done: TransferDone, now_s: float) -> list[tuple[str, bool]]:
        """End a transfer. Return the requests that waited for it, each with whether all of its blocks were loaded."""
        transfer = self.transfers.end(done.job_id)
        if transfer.kind == "store":
            self.demotions.stored(transfer, done, now_s)
        elif transfer.kind == "clear":
            transfer.tier.clearing = False
        elif transfer.kind == "find":
            return self.promotions.found(transfer, done)
        elif transfer.kind == "load":
            return self.promotions.loaded(transfer, done)
        return []

    def overdue(self, now_s: float) -> list[str]:
        """Mark tiers that have become stuck. Return the requests that wait for them, which should compute instead."""
        late = [transfer for transfer in self.transfers if now_s > transfer.due_s]
        for tier in self.tiers:
            tier.stuck = tier.left_out or any(transfer.tier is tier for transfer in late)
        fills = {transfer.fill for transfer in late}
        return [request_id for request_id, fill in self.promotions.waits.items() if fill in fills] if fills else []

    def hanging(self, now_s: float) -> tuple[Tier, ...]:
        """Return the tiers of overdue transfers that hold device blocks; () while other transfers may free some."""
        moving = self.transfers.moving()
        if any(now_s <= transfer.due_s for transfer in moving):
            return ()
        return tuple(sorted({transfer.tier.config.tier for transfer in moving}))

    def clear(self, tier_names: Collection[Tier]) -> None:
        """Forget the blocks of some lower tiers, and clear their stores. Moving blocks will not be published."""
        for transfer in self.transfers:
            transfer.void |= "device" in tier_names or transfer.tier.config.tier in tier_names
        for tier in self.tiers:
            if tier.config.tier in tier_names:
                self._clear(tier)

    def discard(self, blocks: Sequence[GroupKey]) -> None:
        """Forget these blocks in every lower tier. Transfers that contain any of them will publish nothing."""
        unwanted = set(blocks)
        for transfer in self.transfers.moving():
            transfer.void |= any((piece.group, piece.key) in unwanted for piece in transfer.moved)
        for tier in self.tiers:
            for group, key in blocks:
                tier.discard(group, key)

    def _clear(self, tier: LowerTier) -> None:
        """Forget a tier's blocks. If the worker dies before the store is cleared, also ignore its next inventory."""
        tier.clearing = True
        tier.backlog.clear()
        tier.discarded.clear()
        for pool in tier.pools.values():
            pool.drop_all()
        if not tier.left_out:
            self.transfers.begin("clear", tier, [])

    # Views.

    def stats(self) -> tuple[TierStats, ...]:
        """Return one snapshot of each tier."""
        return tuple(tier.stats(self.transfers.num_bytes(tier)) for tier in self.tiers)

    def is_idle(self, now_s: float) -> bool:
        """Return whether no block is moving, and no block waits for a tier that accepts stores."""
        return not self.transfers and not any(tier.backlog for tier in self.tiers if tier.accepts(now_s))

    def check(self) -> None:
        """Assert in every tier and group: free + held + in use = total, and references equal those of transfers.

        Skips pools with more than CHECKED_BLOCKS published blocks.
        """
        for tier in self.tiers:
            references: dict[KVGroup, Counter[int]] = {group: Counter() for group in tier.pools}
            for transfer in self.transfers.moving(tier):
                for piece in transfer.moved:
                    references[piece.group][piece.tier_block] += 1
            for group, pool in tier.pools.items():
                if pool.num_published <= CHECKED_BLOCKS:
                    pool.check(references[group])
        self.promotions.check()
