"""KVCacheManager: owner of block tables; decides which blocks a request uses in all groups."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from pypto_serving.kv.block_table import NOTHING, BlockIds, BlockTable, SequenceState
from pypto_serving.kv.events import EventLog
from pypto_serving.kv.group import ResumePoints, make_groups
from pypto_serving.kv.keys import KeyRule
from pypto_serving.kv.pool import NULL_BLOCK
from pypto_serving.kv.prefix_lookup import longest_prefix, shared_prefix
from pypto_serving.kv.promotion import PrefixLoad
from pypto_serving.kv.tiers import TierManager
from pypto_serving.types.config import FaultConfig, default_of
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.types.tier import KVEvent, StorePolicy, Tier, TierConfig, TierInventory, TransferDone

TRANSFER_TIMEOUT_S: float = default_of(FaultConfig, "transfer_timeout_s")


class KVCacheManager:
    """Owns the block tables of all requests, the groups with their device pools, and the tiers below the device.

    Block i of a table holds tokens [i * B, (i + 1) * B). Blocks that are no longer in `KVGroup.needed` are freed at
    commit; their entries become null. A request's life:

        (match | load_prefix)* → reserve → (reserve | commit)* → release → ... → forget

    No method does I/O or reads a clock. `tiers` configures the lower tiers, whose transfers leave room for a sequence
    of `longest_blocks` blocks in each group; `events` records changes of cached blocks.
    """

    def __init__(
        self,
        specs: tuple[KVCacheGroupSpec, ...],
        num_blocks: tuple[int, ...],
        *,
        prefix_caching: bool = True,
        fingerprint: bytes = b"",
        tiers: Iterable[TierConfig] = (),
        store_policy: StorePolicy = "through",
        longest_blocks: Sequence[int] = (),
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
        events: EventLog | None = None,
    ) -> None:
        self.points = ResumePoints(specs)
        self.groups = make_groups(specs, self.points, events)
        self._key_rule = KeyRule(specs, self.points.step, self.points.lag)
        self.prefix_caching = prefix_caching
        self._events = events
        self.tiers = TierManager(self.groups, tiers, store_policy, longest_blocks, transfer_timeout_s, events)
        self._has_tiers = bool(self.tiers.tiers)
        self._sequences: dict[str, SequenceState] = {}
        self.open(num_blocks, fingerprint)

    def open(self, num_blocks: tuple[int, ...], fingerprint: bytes, inventories: Iterable[TierInventory] = ()) -> None:
        """Begin a new life of the device, with empty pools of `num_blocks`, no requests, and tiers by inventory."""
        self.fingerprint = fingerprint
        if self._events is not None:
            self._events.cleared("device")
        for group, count in zip(self.groups, num_blocks, strict=True):
            group.open(count)
        self._sequences.clear()
        self.tiers.open(inventories)

    # Prefixes.

    def match(self, request_id: str, tokens: array[int], cache_salt: str = "") -> int:
        """Return how many of `tokens` are cached on the device: the longest prefix that every group accepts.

        At most all tokens but one. Changes no block. If blocks were loaded for the request, return their tokens.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            sequence = SequenceState(self.groups, self.points, self._key_rule, self.fingerprint, cache_salt)
            self._sequences[request_id] = sequence
        if sequence.filled:
            return sequence.filled
        if not self.prefix_caching:
            return 0
        sequence.extend_keys(tokens)
        return longest_prefix(sequence, len(tokens) - 1, lambda group: group.pool.find)

    def num_nameable(self, num_tokens: int) -> int:
        """Return the last resume point of the first `num_tokens` tokens up to which block keys can be known."""
        return self.points.last(max(0, num_tokens - self.points.lag)) if self.prefix_caching else 0

    def next_key(self, request_id: str, num_tokens: int) -> bytes | None:
        """Return the key of a request's tokens up to the first resume point after `num_tokens`, or None if unknown."""
        return self._sequences[request_id].chain.until(self.points.last(num_tokens) + self.points.step)

    def num_shared(self, request_id: str, other_id: str, limit: int) -> int:
        """Return the last resume point, at most `limit`, up to which the keys of two requests are known and equal."""
        return shared_prefix(self._sequences[request_id], self._sequences[other_id], limit)

    def load_prefix(self, request_id: str, tokens: array[int], matched: int, may_begin: bool = True) -> PrefixLoad:
        """Begin to load the blocks of a request's `tokens` after those `matched` from lower tiers, if that pays.

        BEGUN: the request must wait until `transferred` returns it, then match again. It may hold blocks meanwhile.
        """
        sequence = self._sequences[request_id]
        if not self._has_tiers or sequence.filled or not self.prefix_caching:
            return PrefixLoad.COMPUTE
        if self._events is not None and self._events.num_unknown:
            self._describe_lower(sequence, tokens, matched, self._events)
        return self.tiers.promotions.load_prefix(request_id, sequence, len(tokens), matched, may_begin)

    def _describe_lower(self, sequence: SequenceState, tokens: array[int], start: int, events: EventLog) -> None:
        """Describe a sequence's blocks after `start` tokens, up to the first one that no tier holds.

        Earlier blocks are on the device, and were described when they were published or loaded.
        """
        end = len(sequence.chain.links) * self.points.step
        for table in sequence.histories[:1]:
            size, g, keys = table.group.block_size, table.group.index, table.keys
            gap = next((i for i in range(start // size, len(keys)) if not events.holds(g, keys[i])), len(keys))
            end = self.points.last(gap * size)
        for table in sequence.tables:
            for i in table.group.useful(start, end):
                table.describe(i, tokens, sequence.salted, events)

    def holds_fill(self, request_id: str) -> bool:
        """Return whether a waiting request holds blocks that were loaded, or are being loaded, for it."""
        return bool(self._sequences[request_id].filled)

    def give_up_fill(self, request_id: str) -> None:
        """Release the blocks of a request's fill. Blocks that have arrived stay cached on the device."""
        sequence = self._sequences[request_id]
        arrived = {pair: tier for pair, tier in sequence.origins.items() if pair[0].pool.find(pair[1]) is not None}
        sequence.origins = arrived
        self.release(request_id)

    def expire_fills(self, now_s: float) -> list[str]:
        """Give up the fills from tiers that are stuck. Return the requests that can be scheduled again."""
        overdue = self.tiers.overdue(now_s)
        for request_id in overdue:
            self.give_up_fill(request_id)
        return overdue

    def transferred(self, done: TransferDone, now_s: float) -> list[str]:
        """Publish the blocks of an ended transfer. Return the requests that can be scheduled again."""
        ended = self.tiers.take_done(done, now_s)
        for request_id, complete in ended:
            if not complete:
                self.give_up_fill(request_id)
        return [request_id for request_id, _ in ended]

    def sources(self, request_id: str, matched: int) -> Counter[Tier]:
        """Count the `matched` tokens by the tier they came from, judging by the blocks of a full-history group."""
        sequence = self._sequences[request_id]
        if not sequence.origins:
            return Counter({"device": matched})
        table = (*sequence.histories, *sequence.recent)[0]
        size, origin_of = table.group.block_size, sequence.origins.get
        sources = Counter(origin_of((table.group, table.keys[i]), "device") for i in range(matched // size))
        return Counter({tier: count * size for tier, count in sources.items()})

    # Growth.

    def reserve(self, request_id: str, num_tokens: int, matched: int = 0) -> BlockIds | None:
        """Grow the tables to hold `num_tokens` tokens in every group, or change nothing and return None.

        For a request without blocks, begin with the blocks of the `matched` tokens, and return the whole tables;
        otherwise return the appended blocks.
        """
        sequence = self._sequences[request_id]
        if num_tokens <= sequence.capacity:
            return NOTHING
        if matched and not sequence.capacity:
            return sequence.start(num_tokens, matched)
        return sequence.grow(num_tokens)

    def growth(self, num_computed: int, num_tokens: int) -> list[int]:
        """Count, per group, the blocks that a request of `num_computed` tokens needs to grow to `num_tokens`.

        0 for a window or state, which frees blocks as it grows.
        """
        return [
            group.num_blocks(num_tokens) - group.num_blocks(num_computed) if group.keeps_history else 0
            for group in self.groups
        ]

    def fits(
        self,
        request_id: str,
        matched: int,
        num_tokens: int,
        step_tokens: int,
        spare: float,
        reserved: Iterable[int],
    ) -> bool:
        """Return whether a request with `matched` cached tokens can grow to `num_tokens` with the blocks free now.

        `step_tokens` of its tokens are computed but not committed. `reserved` blocks of each group, and the share
        `spare` of each pool, must stay free.
        """
        for table, others in zip(self._sequences[request_id].tables, reserved, strict=True):
            pool = table.group.pool
            cached = table.cached(matched)
            in_use = sum(1 for block in cached if block != NULL_BLOCK and not pool.is_free(block))
            in_use += len(table.blocks) - table.first
            needed = table.group.live_blocks(num_tokens, step_tokens) - in_use
            if needed + others + int(pool.num_blocks * spare) > pool.num_free:
                return False
        return True

    def will_fit(self, request_id: str, num_tokens: int) -> bool:
        """Return whether a request can grow to `num_tokens` once running stores to lower tiers free their blocks."""
        tables = zip(self._sequences[request_id].tables, self.tiers.demotions.coming_free(), strict=True)
        return all(table.missing(num_tokens) <= table.group.pool.num_free + coming for table, coming in tables)

    # Progress.

    def commit(self, request_id: str, tokens: array[int], num_computed: int, prompt_len: int) -> None:
        """Commit tokens [0, num_computed), which are certainly computed, as far as enough later tokens are known.

        Publish complete blocks that are needed to resume at any point. Free blocks that are not needed to resume at the
        last committed token.
        """
        sequence = self._sequences[request_id]
        sequence.computed = num_computed
        if num_computed < sequence.due:
            return
        if not self.prefix_caching:
            sequence.free_passed(num_computed)
            return
        end = min(num_computed, len(tokens) - self.points.lag)
        if sequence.committed >= end:
            return
        start, position = self.points.last(sequence.committed), self.points.last(end)
        if position > sequence.resume_point:
            sequence.extend_keys(tokens)
            for table in sequence.tables:
                self._publish(table, sequence, tokens, start, position)
            self._pass_resume_points(sequence, start, position, prompt_len)
        sequence.free_passed(end)

    def _publish(self, table: BlockTable, sequence: SequenceState, tokens: array[int], start: int, end: int) -> None:
        """Publish the useful blocks of one group that end in (start, end]; both are resume points."""
        keys, blocks, pool = table.keys, table.blocks, table.group.pool
        keep = self._has_tiers and table.group.keeps_history
        for i in table.group.useful(start, end):
            pool.publish(blocks[i], keys[i])
            if keep:
                pool.keep(blocks[i])
            if self._events is not None:
                table.describe(i, tokens, sequence.salted, self._events)

    def _pass_resume_points(self, sequence: SequenceState, start: int, end: int, prompt_len: int) -> None:
        """Keep the resume blocks of windows and states in (start, end]; both are resume points.

        1. At each checkpoint: mark them to be stored in lower tiers once they are free.
        2. At `end`: hold them, and release the ones held before.
        """
        if sequence.recent and self._has_tiers:
            for position in self.points.checkpoints(start, end, prompt_len):
                self._keep_resume_blocks(sequence, position)
        sequence.resume_point = end
        for table in sequence.recent:
            table.hold_resume_blocks(end)

    def _keep_resume_blocks(self, sequence: SequenceState, position: int) -> None:
        """Mark the resume blocks of a committed position to be stored in lower tiers once they are free."""
        for table in sequence.recent if self._has_tiers else ():
            for block_id in table.resume_blocks_at(position):
                table.group.pool.keep(block_id)

    # The end.

    def release(self, request_id: str) -> None:
        """Free all blocks of a request in every group; it may reserve again later. Ignore unknown ids.

        The resume blocks of its last resume point will be stored in lower tiers.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self.tiers.promotions.abandon(request_id)
        if not sequence.capacity:
            return
        self._keep_resume_blocks(sequence, sequence.resume_point)
        for table in sequence.tables:
            table.group.pool.free(table.resume_blocks)
            table.group.pool.free(table.live())
        sequence.clear()

    def demote(self, request_id: str, now_s: float) -> None:
        """Release a preempted request, and begin to store its blocks in lower tiers before they are evicted."""
        sequence = self._sequences[request_id]
        keys = [
            (table.group, key)
            for table in sequence.tables
            for block_id in reversed([*table.resume_blocks, *table.live()])
            if (key := table.group.pool.key(block_id)) is not None
        ]
        self.release(request_id)
        if self._has_tiers:
            released = [(group, key) for group, key in keys if group.pool.find(key) in group.pool.released]
            self.tiers.demotions.demote(released, now_s)

    def forget(self, request_id: str) -> None:
        """Release a request for good."""
        self.release(request_id)
        self._sequences.pop(request_id, None)

    def discard(self, request_id: str) -> None:
        """Forget the cached blocks of a request in all tiers, since they may be corrupt. Running requests keep them.

        The bytes in a lower tier are not erased, so another process may find them again.
        """
        sequence = self._sequences[request_id]
        end = len(sequence.chain.links) * self.points.step
        blocks = [(table.group, table.keys[i]) for table in sequence.tables for i in table.group.useful(0, end)]
        self.tiers.discard(blocks)
        for group, key in blocks:
            block_id = group.pool.find(key)
            if block_id is not None:
                group.pool.drop(block_id)

    def clear(self, tiers: Collection[Tier]) -> None:
        """Forget the cached blocks of some tiers. Running requests keep theirs, but no other request finds these."""
        self.tiers.clear(tiers)
        if "device" in tiers:
            for group in self.groups:
                group.pool.drop_all()

    # Views.

    def take_events(self) -> list[KVEvent]:
        """Return the events of cached blocks since the last call, in order."""
        return [] if self._events is None else self._events.take()

    def usage(self) -> tuple[float, ...]:
        """Return, per group, the share of blocks in use, in [0, 1], without blocks used only by stores."""
        pools = zip((group.pool for group in self.groups), self.tiers.demotions.coming_free(), strict=True)
        return tuple([1 - (pool.num_free + coming) / pool.num_blocks for pool, coming in pools])

    def table(self, request_id: str) -> BlockIds:
        """Return a copy of a request's block table."""
        return self._sequences[request_id].block_ids()

    def __len__(self) -> int:
        return len(self._sequences)

    def check(self) -> None:
        """Assert in every group: free + cached + in use = total, and references equal table entries."""
        for g, group in enumerate(self.groups):
            references = self.tiers.transfers.references(group)
            for sequence in self._sequences.values():
                table = sequence.tables[g]
                live = table.live()
                passed = table.group.first_needed(sequence.committed) - table.first
                assert 0 <= passed <= table.group.run, "a block was freed too early or late"
                assert NULL_BLOCK not in live, f"null block inside the live table of group {group.spec.name}"
                references.update(live)
                references.update(table.resume_blocks)
            group.pool.check(references)
        self.tiers.check()
