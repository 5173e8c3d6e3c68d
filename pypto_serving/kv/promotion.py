"""Promotions: owner of the fills that requests wait for; loads blocks from lower tiers to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pypto_serving.kv.group import GroupKey
from pypto_serving.kv.lower_tier import LowerTier, fastest
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.rate import Rate
from pypto_serving.kv.transfers import ActiveTransfers, Fill, Moved, Transfer, TransferState, Wanted
from pypto_serving.types.tier import Tier, TransferDone


class Promotions:
    """Owns the Fills, and the blocks that each brings; measures whether loading is faster than computing.

    `_fills` are by the request that began them, `_joined` by the other requests that wait for them.
    A part of the TierManager, with which it shares `tiers` and `transfers`.
    """

    def __init__(self, tiers: Sequence[LowerTier], transfers: ActiveTransfers) -> None:
        self._tiers = tiers
        self._transfers = transfers
        self.prefill_rate = Rate()
        self._fills: dict[str, Fill] = {}
        self._joined: dict[str, Fill] = {}
        self._filling: dict[GroupKey, Fill] = {}

    def forget_all(self) -> None:
        """Forget every fill, because the worker is gone."""
        self._fills.clear()
        self._joined.clear()
        self._filling.clear()

    # Before.

    def pays(self, num_tokens: int, tier_bytes: Counter[LowerTier]) -> bool:
        """Return whether loading is expected to be faster than computing `num_tokens`; if not, count the refusal.

        Tiers load beside each other, each what is on its way there and then its `tier_bytes`. What is on its way is
        bounded by the device blocks that it fills.
        """
        load_s = max((t.load_rate.seconds(size + t.loading_bytes) for t, size in tier_bytes.items()), default=0.0)
        if load_s < self.prefill_rate.seconds(num_tokens) or not self.prefill_rate.measured:
            return True
        for tier in tier_bytes:
            tier.load_rate.refuse()
            tier.counters.refused_fills += 1
        return False

    def fill_of(self, wanted: Iterable[GroupKey]) -> Fill | None:
        """Return the fill of another request that brings one of these blocks."""
        fills = (fill for pair in wanted if (fill := self._filling.get(pair)) is not None)
        return next((fill for fill in fills if self._fills.get(fill.request_id) is fill), None)

    def join(self, request_id: str, fill: Fill) -> None:
        """Wait for the fill of another request."""
        fill.waiters.append(request_id)
        self._joined[request_id] = fill

    @property
    def num_fills(self) -> int:
        """Number of fills that a request waits for."""
        return len(self._fills)

    @property
    def has_shared(self) -> bool:
        """Whether others fill a tier too, so that it has to be asked, and it can answer."""
        return any(tier.shared and not tier.stuck for tier in self._tiers)

    # Under way.

    def load(self, request_id: str, wanted: Iterable[Wanted], num_tokens: int) -> dict[GroupKey, Tier]:
        """Fill device blocks, to which the caller refers, each from the fastest tier that has it. Returns which has.

        That spares computing `num_tokens`.
        """
        fill = self._fills[request_id] = Fill(request_id, num_tokens)
        parts: dict[LowerTier, list[Moved]] = {tier: [] for tier in self._tiers}
        for group, block, key in wanted:
            tier = fastest(self._tiers, group, key)
            assert tier is not None, "a block that no tier holds cannot be loaded"
            place = tier.find(group, key)
            assert place is not None
            parts[tier].append(Moved(group, block, place, key))
            self._filling[group, key] = fill
        for tier, moved in parts.items():
            if moved:
                for piece in moved:
                    piece.group.pool.share([piece.block])
                    tier.pools[piece.group].share([piece.place])
                self._transfers.begin("load", tier, moved, fill)
        return {(piece.group, piece.key): tier.config.tier for tier, moved in parts.items() for piece in moved}

    def ask(self, request_id: str, wanted: Iterable[GroupKey]) -> None:
        """Ask tiers that others fill too which of these blocks they hold."""
        pieces = [Moved(group, NULL_BLOCK, NULL_BLOCK, key) for group, key in wanted]
        fill = self._fills[request_id] = Fill(request_id, 0)
        for tier in self._tiers:
            if tier.shared and not tier.stuck:
                self._transfers.begin("find", tier, pieces, fill)

    def abandon(self, request_id: str) -> None:
        """Stop waiting; transfers still finish and publish their blocks."""
        joined = self._joined.pop(request_id, None)
        if joined is not None:
            joined.waiters.remove(request_id)
        fill = self._fills.pop(request_id, None)
        if fill is not None:
            self._transfers.abandon(fill)

    def waiting_for(self, transfers: Iterable[Transfer]) -> list[str]:
        """Return the requests that wait for one of `transfers`: who began them, unless it gave up, and who joined."""
        fills = dict.fromkeys(transfer.fill for transfer in transfers if transfer.fill is not None)
        return [
            name
            for fill in fills
            for name in (fill.request_id, *fill.waiters)
            if fill in (self._fills.get(name), self._joined.get(name))
        ]

    # Done.

    def found(self, transfer: Transfer, done: TransferDone) -> list[tuple[str, bool]]:
        """Note what a tier that was asked holds. Returns what `TierManager.take_done` does."""
        if not transfer.void:
            pieces = zip(transfer.moved, done.done, strict=True)
            transfer.tier.learn((piece.group, piece.key) for piece, ok in pieces if ok)
        return self._ended(transfer, True, done.elapsed_s)

    def loaded(self, transfer: Transfer, done: TransferDone) -> list[tuple[str, bool]]:
        """Publish the blocks that arrived, and forget those that the tier turned out not to hold."""
        tier, num_bytes = transfer.tier, 0
        for piece, ok in zip(transfer.moved, done.done, strict=True):
            group, block, place, key = piece
            if self._filling.get((group, key)) is transfer.fill:
                del self._filling[group, key]
            num_bytes += group.block_bytes * ok
            if ok and not transfer.void:
                group.pool.publish(block, key)
                group.pool.keep(block)
            elif not ok and tier.find(group, key) == place:
                tier.pools[group].drop(place)
        for piece in reversed(transfer.moved):
            tier.pools[piece.group].free([piece.place])
            piece.group.pool.free([piece.block])
        tier.counters.loaded(done, num_bytes)
        if any(done.done):
            tier.load_rate.add(num_bytes, done.elapsed_s)
        return self._ended(transfer, all(done.done), done.elapsed_s)

    def _ended(self, transfer: Transfer, ok: bool, elapsed_s: float) -> list[tuple[str, bool]]:
        """Count a transfer of a fill as ended. Returns who waited once it is the last one."""
        fill = transfer.fill
        assert fill is not None
        fill.num_leases -= 1
        fill.failed |= not ok
        fill.ended.append((transfer, elapsed_s))
        if fill.num_leases:
            return []
        waiters = [(request_id, True) for request_id in fill.waiters]
        for request_id in fill.waiters:
            del self._joined[request_id]
        if transfer.state is TransferState.QUARANTINED:
            return waiters
        del self._fills[fill.request_id]
        if not fill.failed:
            self._credit(fill)
        return [(fill.request_id, not fill.failed), *waiters]

    # Speed.

    def record_prefill(self, num_tokens: int, elapsed_s: float) -> None:
        """Record the measured prefill speed."""
        self.prefill_rate.add(num_tokens, elapsed_s)
        self._count_saved()

    def _credit(self, fill: Fill) -> None:
        """Credit each tier, by its bytes, with tokens that a fill spared, and debit the time of its loads."""
        num_bytes = sum(transfer.num_bytes for transfer, _ in fill.ended)
        for transfer, elapsed_s in fill.ended if num_bytes else ():
            transfer.tier.spared_tokens += fill.num_tokens * transfer.num_bytes / num_bytes
            transfer.tier.spent_s += elapsed_s
        self._count_saved()

    def _count_saved(self) -> None:
        """Convert spared tokens to seconds, once the prefill speed is known: after a restart, loads come before."""
        for tier in self._tiers if self.prefill_rate.measured else ():
            tier.counters.saved_s += self.prefill_rate.seconds(tier.spared_tokens) - tier.spent_s
            tier.spared_tokens = tier.spent_s = 0.0

    def check(self) -> None:
        """Assert that a transfer brings each block that somebody is told to wait for."""
        moving = {(piece.group, piece.key) for transfer in self._transfers for piece in transfer.moved}
        assert self._filling.keys() <= moving, "a block is said to come, but nothing brings it"
        fills = {transfer.fill for transfer in self._transfers}
        assert fills >= {*self._fills.values(), *self._joined.values()}, "a request waits for what nothing brings"
        assert all(name in fill.waiters for name, fill in self._joined.items())
