"""Promotions: owner of the waits for loads; loads blocks from lower tiers to the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pypto_serving.kv.group import GroupKey
from pypto_serving.kv.lower_tier import (
    ActiveTransfers,
    Fill,
    LowerTier,
    Moved,
    Transfer,
    TransferState,
    Wanted,
    fastest,
)
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.rate import Rate
from pypto_serving.types.tier import Tier, TransferDone


class Promotions:
    """Owns the Fills, the blocks that each brings, and which request waits for which fill.

    - `waits`: the fill that each waiting request waits for. The request that began a fill comes before others that want
      some of the same blocks; it is absent once it has given up.
    - `_filling`: the fill that brings a block.

    Measures whether loading is faster than computing. A part of the TierManager, which shares `tiers` and `transfers`.
    """

    def __init__(self, tiers: Sequence[LowerTier], transfers: ActiveTransfers) -> None:
        self._tiers = tiers
        self._transfers = transfers
        self.prefill_rate = Rate()
        self.waits: dict[str, Fill] = {}
        self._filling: dict[GroupKey, Fill] = {}

    def forget_all(self) -> None:
        """Forget every fill, because the worker is gone."""
        self.waits.clear()
        self._filling.clear()

    # Before.

    def pays(self, num_tokens: int, tier_bytes: Counter[LowerTier]) -> bool:
        """Return whether loading is expected to be faster than computing `num_tokens`; if not, count the refusal.

        Tiers load in parallel, each first the bytes already on their way, then its `tier_bytes`.
        """
        load_s = max((t.load_rate.seconds(size + t.loading_bytes) for t, size in tier_bytes.items()), default=0.0)
        if load_s < self.prefill_rate.seconds(num_tokens) or not self.prefill_rate.measured:
            return True
        for tier in tier_bytes:
            tier.load_rate.refuse()
            tier.counters.refused_fills += 1
        return False

    def fill_of(self, wanted: Iterable[GroupKey]) -> Fill | None:
        """Return the fill of another request that brings one of these blocks, and that this request still wants."""
        fills = (fill for pair in wanted if (fill := self._filling.get(pair)) is not None)
        return next((fill for fill in fills if self.waits.get(fill.request_id) is fill), None)

    @property
    def has_shared(self) -> bool:
        """Whether there is a tier that others fill too, so that it has to be asked, and that can answer."""
        return any(tier.shared and not tier.stuck for tier in self._tiers)

    # Under way.

    def load(self, request_id: str, wanted: Iterable[Wanted], num_tokens: int) -> dict[GroupKey, Tier]:
        """Begin to fill device blocks, to which the caller refers, each from the fastest tier that has it.

        That spares computing `num_tokens`. Return which tier has which block.
        """
        fill = self.waits[request_id] = Fill(request_id, num_tokens)
        parts: dict[LowerTier, list[Moved]] = {tier: [] for tier in self._tiers}
        for group, block, key in wanted:
            tier = fastest(self._tiers, group, key)
            assert tier is not None, "a block that no tier holds cannot be loaded"
            tier_block = tier.find(group, key)
            assert tier_block is not None
            parts[tier].append(Moved(group, block, tier_block, key))
            self._filling[group, key] = fill
        for tier, moved in parts.items():
            if moved:
                for piece in moved:
                    piece.group.pool.share([piece.block])
                    tier.pools[piece.group].share([piece.tier_block])
                self._transfers.begin("load", tier, moved, fill)
        return {(piece.group, piece.key): tier.config.tier for tier, moved in parts.items() for piece in moved}

    def ask(self, request_id: str, wanted: Iterable[GroupKey]) -> None:
        """Ask tiers that others fill too which of these blocks they hold."""
        pieces = [Moved(group, NULL_BLOCK, NULL_BLOCK, key) for group, key in wanted]
        fill = self.waits[request_id] = Fill(request_id, 0)
        for tier in self._tiers:
            if tier.shared and not tier.stuck:
                self._transfers.begin("find", tier, pieces, fill)

    def abandon(self, request_id: str) -> None:
        """Stop waiting. Transfers still finish and publish their blocks."""
        fill = self.waits.pop(request_id, None)
        if fill is not None and fill.request_id == request_id:
            self._transfers.abandon(fill)

    def waiting_for(self, transfers: Iterable[Transfer]) -> list[str]:
        """Return the requests that wait for one of `transfers`."""
        fills = {transfer.fill for transfer in transfers}
        return [request_id for request_id, fill in self.waits.items() if fill in fills] if fills else []

    # Done.

    def found(self, transfer: Transfer, done: TransferDone) -> list[tuple[str, bool]]:
        """Note what a tier that was asked holds. Return what `_ended` does."""
        if not transfer.void:
            pieces = zip(transfer.moved, done.done, strict=True)
            transfer.tier.learn((piece.group, piece.key) for piece, ok in pieces if ok)
        return self._ended(transfer, True, done.elapsed_s)

    def loaded(self, transfer: Transfer, done: TransferDone) -> list[tuple[str, bool]]:
        """Publish the blocks that arrived, and forget those that the tier does not hold. Return what `_ended` does."""
        tier, num_bytes = transfer.tier, 0
        for piece, ok in zip(transfer.moved, done.done, strict=True):
            group, block, tier_block, key = piece
            if self._filling.get((group, key)) is transfer.fill:
                del self._filling[group, key]
            num_bytes += group.block_bytes * ok
            if ok and not transfer.void:
                group.pool.publish(block, key)
                group.pool.keep(block)
            elif not ok and tier.find(group, key) == tier_block:
                tier.pools[group].drop(tier_block)
        for piece in reversed(transfer.moved):
            tier.pools[piece.group].free([piece.tier_block])
            piece.group.pool.free([piece.block])
        tier.counters.loaded(done, num_bytes)
        if any(done.done):
            tier.load_rate.add(num_bytes, done.elapsed_s)
        return self._ended(transfer, all(done.done), done.elapsed_s)

    def _ended(self, transfer: Transfer, ok: bool, elapsed_s: float) -> list[tuple[str, bool]]:
        """Count a transfer of a fill as ended. After the last one, return the requests that waited for the fill.

        With each comes whether it got all that it waited for.
        """
        fill = transfer.fill
        assert fill is not None
        fill.num_transfers -= 1
        fill.failed |= not ok
        fill.ended.append((transfer, elapsed_s))
        if fill.num_transfers:
            return []
        waiting = [request_id for request_id, other in self.waits.items() if other is fill]
        for request_id in waiting:
            del self.waits[request_id]
        if not fill.failed and transfer.state is not TransferState.QUARANTINED:
            self._credit(fill)
        return [(request_id, not fill.failed or request_id != fill.request_id) for request_id in waiting]

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
        """Assert that a transfer brings each block that a request waits for."""
        moving = {(piece.group, piece.key) for transfer in self._transfers for piece in transfer.moved}
        assert self._filling.keys() <= moving, "a block is said to come, but nothing brings it"
        fills = {transfer.fill for transfer in self._transfers}
        assert fills >= {*self.waits.values()}, "a request waits for what nothing brings"
