"""Promotions: load prefixes of waiting requests from lower tiers to the device, if that is faster than computing."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pypto_serving.kv.block_table import SequenceState
from pypto_serving.kv.group import GroupKey
from pypto_serving.kv.lower_tier import ActiveTransfers, Fill, LowerTier, Moved, Transfer, TransferState, fastest
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.prefix_lookup import longest_prefix, on_device_or_in
from pypto_serving.types.tier import TransferDone
from pypto_serving.util import Rate


class PrefixLoad(enum.Enum):
    """COMPUTE: load nothing. BEGUN: wait for transfers. LATER: loading pays, but must wait for other loads."""

    COMPUTE = "compute"
    BEGUN = "begun"
    LATER = "later"


class Promotions:
    """Owns the Fills, the blocks that each one loads, and the requests that wait for fills.

    - `waits`: for each waiting request, its fill. The request that began a fill precedes others that want some of the
      same blocks; it is removed when it gives up.
    - `_filling`: for each block being loaded, its fill.

    Estimates whether loading is faster than computing. A part of the TierManager, which shares `tiers` and `transfers`.
    """

    def __init__(self, tiers: Sequence[LowerTier], transfers: ActiveTransfers) -> None:
        self._tiers = tiers
        self._transfers = transfers
        self.prefill_rate = Rate()
        self.waits: dict[str, Fill] = {}
        self._filling: dict[GroupKey, Fill] = {}

    def forget_all(self) -> None:
        """Forget all fills, since the worker is gone."""
        self.waits.clear()
        self._filling.clear()

    # Deciding.

    def load_prefix(
        self, request_id: str, sequence: SequenceState, num_tokens: int, matched: int, may_begin: bool
    ) -> PrefixLoad:
        """Begin to load the blocks of `num_tokens` tokens after `matched` from lower tiers, if that pays.

        First, ask shared tiers once which blocks they hold. Then consider the prefix that all tiers hold together, next
        the one without the slowest tier, and so on. Without `may_begin`, return LATER instead of beginning a transfer
        or waiting for one. Cases for each prefix:

        1. Not longer than the match, so neither are the following ones: compute.
        2. Equal to the refused one before, since the slowest tier adds nothing: consider the next.
        3. Some of its blocks are being loaded for another request: wait for that.
        4. Loading is expected to be faster than computing: load it, or compute if its blocks do not fit (see `_fill`).
        5. Otherwise refuse it.
        """
        if not sequence.asked:
            unknown = list(self._unknown(sequence, num_tokens))
            if unknown and not may_begin:
                return PrefixLoad.LATER
            sequence.asked = True
            if unknown:
                self._ask(request_id, unknown)
                return PrefixLoad.BEGUN
        refused = matched
        for depth in range(len(self._tiers), 0, -1):
            fetched = longest_prefix(sequence, num_tokens - 1, on_device_or_in(self._tiers[:depth]))
            if fetched <= matched:
                return PrefixLoad.COMPUTE
            if fetched == refused:
                continue
            lacking = sequence.lacking(fetched)
            other = self._fill_of(lacking)
            if other is None and not self._pays(fetched - matched, lacking):
                refused = fetched
            elif not may_begin:
                return PrefixLoad.LATER
            elif other is not None:
                self.waits[request_id] = other
                return PrefixLoad.BEGUN
            else:
                return self._fill(request_id, sequence, fetched, fetched - matched)
        return PrefixLoad.COMPUTE

    def _shared(self) -> list[LowerTier]:
        """Return the shared tiers, which other replicas also fill so that they must be asked, if they can answer."""
        return [tier for tier in self._tiers if tier.shared and not tier.stuck]

    def _unknown(self, sequence: SequenceState, num_tokens: int) -> Iterator[GroupKey]:
        """Yield the blocks for resuming within `num_tokens` known tokens that only shared tiers may hold.

        Any resume point may be a checkpoint of another replica, since the ends of its prompts and turns are unknown.
        """
        if not self._shared():
            return
        points, find_in = sequence.points, on_device_or_in(self._tiers)
        end = points.last(max(0, num_tokens - max(1, points.lag)))
        for table in (*sequence.histories, *sequence.recent):
            find = find_in(table.group)
            for i in table.group.useful(0, end):
                if find(table.keys[i]) is None:
                    yield table.group, table.keys[i]

    def _ask(self, request_id: str, wanted: Iterable[GroupKey]) -> None:
        """Ask shared tiers which of these blocks they hold."""
        pieces = [Moved(group, NULL_BLOCK, NULL_BLOCK, key) for group, key in wanted]
        fill = self.waits[request_id] = Fill(request_id, 0)
        for tier in self._shared():
            self._transfers.begin("find", tier, pieces, fill)

    def _fill_of(self, wanted: Iterable[GroupKey]) -> Fill | None:
        """Return the fill of another request that loads one of these blocks, which are still missing, or None."""
        fills = (fill for pair in wanted if (fill := self._filling.get(pair)) is not None)
        return next((fill for fill in fills if self.waits.get(fill.request_id) is fill), None)

    def _pays(self, num_tokens: int, blocks: Iterable[GroupKey]) -> bool:
        """Return whether loading `blocks` should be faster than computing `num_tokens`; if not, count a refusal.

        Tiers load in parallel; each must first move the bytes that are already queued.
        """
        sizes: Counter[LowerTier] = Counter()
        for group, key in blocks:
            if (tier := fastest(self._tiers, group, key)) is not None:
                sizes[tier] += group.block_bytes
        before = self._transfers.num_bytes
        load_s = max((t.load_rate.seconds(size + before(t, "load")) for t, size in sizes.items()), default=0.0)
        if load_s < self.prefill_rate.seconds(num_tokens) or not self.prefill_rate.measured:
            return True
        for tier in sizes:
            tier.load_rate.refuse()
            tier.counters.refused_fills += 1
        return False

    # Loading.

    def _fill(self, request_id: str, sequence: SequenceState, num_tokens: int, num_spared: int) -> PrefixLoad:
        """Give a request the blocks of its first `num_tokens` tokens and load the missing ones, if they fit.

        This spares computing `num_spared` tokens. Hanging loads keep their blocks, so if there are other loads, a fill
        must leave room for one sequence of the longest length, or wait for the other fills.
        """
        found = [table.find_needed(num_tokens) for table in sequence.tables]
        for table, blocks in zip(sequence.tables, found, strict=True):
            pool = table.group.pool
            if sum(1 for block_id in blocks if block_id is None or pool.is_free(block_id)) > pool.num_free:
                return PrefixLoad.COMPUTE
        if self._transfers.moving(None, "load") and any(
            blocks.count(None) > self._transfers.block_budget(table.group)
            for table, blocks in zip(sequence.tables, found, strict=True)
        ):
            return PrefixLoad.LATER if self.waits else PrefixLoad.COMPUTE
        self._load(request_id, sequence, num_tokens, found, Fill(request_id, num_spared))
        return PrefixLoad.BEGUN

    def _load(
        self, request_id: str, sequence: SequenceState, num_tokens: int, found: Sequence[list[int | None]], fill: Fill
    ) -> None:
        """Begin to load the blocks not `found` on the device, each from the fastest tier that has it."""
        self.waits[request_id] = fill
        parts: dict[LowerTier, list[Moved]] = {tier: [] for tier in self._tiers}
        for table, blocks in zip(sequence.tables, found, strict=True):
            group = table.group
            for block, key in table.fill(num_tokens, blocks):
                tier = fastest(self._tiers, group, key)
                assert tier is not None, "a block that no tier holds cannot be loaded"
                tier_block = tier.find(group, key)
                assert tier_block is not None
                group.pool.share([block])
                tier.pools[group].share([tier_block])
                parts[tier].append(Moved(group, block, tier_block, key))
                self._filling[group, key] = fill
                sequence.origins[group, key] = tier.config.tier
        sequence.set_capacity()
        sequence.filled = sequence.computed = sequence.committed = num_tokens
        for tier, moved in parts.items():
            if moved:
                self._transfers.begin("load", tier, moved, fill)

    def abandon(self, request_id: str) -> None:
        """Stop waiting. Transfers still finish and publish their blocks."""
        fill = self.waits.pop(request_id, None)
        if fill is not None and fill.request_id == request_id:
            self._transfers.abandon(fill)

    # Done.

    def found(self, transfer: Transfer, done: TransferDone) -> list[tuple[str, bool]]:
        """Record the answer of a tier that was asked for blocks. Return the result of `_ended`."""
        if not transfer.void:
            pieces = zip(transfer.moved, done.done, strict=True)
            transfer.tier.learn((piece.group, piece.key) for piece, ok in pieces if ok)
        return self._ended(transfer, True, done.elapsed_s)

    def loaded(self, transfer: Transfer, done: TransferDone) -> list[tuple[str, bool]]:
        """Publish the loaded blocks, and forget blocks that the tier lacked. Return the result of `_ended`."""
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

        Each is returned with whether all of its blocks were loaded.
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
        """Credit each tier with tokens that a fill spared, in proportion to bytes, and debit the time of its loads."""
        num_bytes = sum(transfer.num_bytes for transfer, _ in fill.ended)
        for transfer, elapsed_s in fill.ended if num_bytes else ():
            transfer.tier.spared_tokens += fill.num_tokens * transfer.num_bytes / num_bytes
            transfer.tier.spent_s += elapsed_s
        self._count_saved()

    def _count_saved(self) -> None:
        """Convert spared tokens to seconds once the prefill speed is known; after a restart, loads may precede that."""
        for tier in self._tiers if self.prefill_rate.measured else ():
            tier.counters.saved_s += self.prefill_rate.seconds(tier.spared_tokens) - tier.spent_s
            tier.spared_tokens = tier.spent_s = 0.0

    def check(self) -> None:
        """Assert that a transfer loads each block for which a request waits."""
        moving = {(piece.group, piece.key) for transfer in self._transfers for piece in transfer.moved}
        assert self._filling.keys() <= moving, "a block is said to come, but nothing brings it"
        fills = {transfer.fill for transfer in self._transfers}
        assert fills >= {*self.waits.values()}, "a request waits for what nothing brings"
