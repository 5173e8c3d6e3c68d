"""KVCacheManager: owner of block tables; decides which blocks a request uses, in all groups at once."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from pypto_serving.kv.events import EventLog, pool_events
from pypto_serving.kv.lease import Wanted
from pypto_serving.kv.pool import NULL_BLOCK, BlockPool
from pypto_serving.kv.positions import ResumePoints
from pypto_serving.kv.prefix import KeyChain, root_key
from pypto_serving.kv.sequence import SequenceState
from pypto_serving.kv.tiers import TierManager
from pypto_serving.types.events import KVEvent
from pypto_serving.types.kv import KVCacheGroupSpec, max_live_blocks
from pypto_serving.types.tier import Tier, TierInventory, TransferDone
from pypto_serving.util import ceil_div

BlockIds = tuple[list[int], ...]
"""Block ids per group, in order of position."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the device holds of a request: its first `num_tokens` can be taken over now."""

    num_tokens: int


NO_MATCH = Match(0)


class KVCacheManager:
    """Owns the block tables of all requests; block i of a table holds tokens [i * B, (i + 1) * B).

    Blocks before what `ResumePoints` says is needed are given back at commit and leave a null entry. A request's life:
    (match | fetch)* → reserve → (reserve | commit)* → release → ... → forget. Nothing here does I/O or reads a clock.
    `tiers` decides about the tiers below the device; `events`, which it shares, notes what happens to cached blocks.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        num_blocks: tuple[int, ...],
        *,
        prefix_caching: bool = True,
        fingerprint: bytes = b"",
        tiers: TierManager | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.groups = groups
        self._events = events
        self.prefix_caching = prefix_caching
        self.tiers = tiers or TierManager(groups, ())
        self._sequences: dict[str, SequenceState] = {}
        self._nothing: BlockIds = tuple([] for _ in groups)
        self._history_first = sorted(range(len(groups)), key=lambda g: not groups[g].keeps_history)
        self._tail_groups = [g for g, group in enumerate(groups) if not group.keeps_history]
        self.points = ResumePoints(groups)
        self.open(num_blocks, fingerprint)

    def match(self, request_id: str, tokens: array[int], cache_salt: str = "") -> Match:
        """Longest prefix of `tokens` that every group accepts, at most all but one token. Changes no block.

        Each group shrinks the candidate by its own rule until none objects.
        """
        sequence = self._sequence(request_id, cache_salt)
        if sequence.filled:
            return Match(sequence.filled)
        if not self.prefix_caching:
            return NO_MATCH
        self._extend_keys(sequence, tokens)
        if self._events is not None and self._events.num_unknown:
            for g, chain in enumerate(sequence.chains):
                for i in range(len(chain.keys)):
                    self._describe(g, sequence, tokens, i)
        return Match(self._longest(sequence, len(tokens) - 1, 0))

    def _longest(self, sequence: SequenceState, limit: int, depth: int) -> int:
        """Tokens, at most `limit`, that the device and the first `depth` tiers hold."""
        candidate, agreed = limit, -1
        while candidate != agreed:
            agreed = candidate
            for g in self._history_first:
                candidate = self._longest_accepted(g, sequence.chains[g].keys, candidate, self._finder(g, depth))
        return candidate

    def _finder(self, g: int, depth: int) -> Callable[[bytes], object | None]:
        """Tells where a block of group g is, None for nowhere."""
        find, tiers = self._pools[g].find, self.tiers
        if depth == 0:
            return find

        def find_below(key: bytes) -> object | None:
            block_id = find(key)
            return tiers.find(g, key, depth) if block_id is None else block_id

        return find_below

    def _longest_accepted(self, g: int, keys: list[bytes], limit: int, find: Callable[[bytes], object | None]) -> int:
        """Largest n <= limit at which group g can resume with the blocks that `find` finds."""
        group = self.groups[g]
        size = group.block_size
        last = min(limit // size, len(keys))
        if group.keeps_history:
            for i in range(last):
                if find(keys[i]) is None:
                    return i * size
            return last * size
        while last > 0:
            first = group.first_needed(last * size) // size
            missing = next((i for i in range(last - 1, first - 1, -1) if find(keys[i]) is None), None)
            if missing is None:
                break
            last = missing
        return last * size

    # From lower tiers.

    def fetch(self, request_id: str, num_tokens: int, match: Match) -> bool:
        """Begin to load what lower tiers hold of a request of `num_tokens` tokens beyond `match`, if that pays.

        True: the request has to wait until `transferred` names it, and match again; it may hold blocks meanwhile.
        """
        sequence = self._sequences[request_id]
        if not self.tiers.tiers or sequence.filled or not self.prefix_caching:
            return False
        if not sequence.asked:
            sequence.asked = True
            if self.tiers.ask(request_id, self._unknown(sequence, num_tokens)):
                return True
        refused = match.num_tokens
        for depth in range(len(self.tiers.tiers), 0, -1):
            fetched = self._longest(sequence, num_tokens - 1, depth)
            if fetched <= match.num_tokens:
                break
            if fetched == refused:
                continue
            lacking = self._lacking(sequence, fetched)
            if self.tiers.joins(request_id, lacking):
                return True
            if self.tiers.worth(fetched - match.num_tokens, self._bytes_by_tier(lacking)):
                return self._fill(request_id, sequence, fetched, fetched - match.num_tokens)
            refused = fetched
        return False

    def _lacking(self, sequence: SequenceState, num_tokens: int) -> list[tuple[int, bytes]]:
        """Blocks that the device lacks to resume at `num_tokens`."""
        return [
            (g, sequence.chains[g].keys[i])
            for g in range(len(self.groups))
            for i in self.points.needed(g, num_tokens)
            if self._pools[g].find(sequence.chains[g].keys[i]) is None
        ]

    def _unknown(self, sequence: SequenceState, num_tokens: int) -> list[tuple[int, bytes]]:
        """Blocks that resuming within `num_tokens` known tokens needs and that are in no tier as far as we know.

        Where the prompts and turns of others ended is not known: any position may be a checkpoint.
        """
        depth, end = len(self.tiers.tiers), self.points.last(max(0, num_tokens - max(1, self.points.lag)))
        keys = ((g, sequence.chains[g].keys[i]) for g in self._history_first for i in self.points.useful(g, 0, end))
        return [(g, key) for g, key in keys if self._finder(g, depth)(key) is None]

    def _bytes_by_tier(self, blocks: Sequence[tuple[int, bytes]]) -> Counter[Tier]:
        sizes: Counter[Tier] = Counter()
        for g, key in blocks:
            tier = self.tiers.find(g, key, len(self.tiers.tiers))
            if tier is not None:
                sizes[tier.config.tier] += self.groups[g].block_bytes
        return sizes

    def _fill(self, request_id: str, sequence: SequenceState, num_tokens: int, num_spared: int) -> bool:
        """Give a request the blocks of its first `num_tokens` tokens and have the missing ones loaded, if they fit.

        That spares computing `num_spared` tokens.
        """
        held = []
        for g, pool in enumerate(self._pools):
            found = [pool.find(sequence.chains[g].keys[i]) for i in self.points.needed(g, num_tokens)]
            if sum(1 for block_id in found if block_id is None or pool.is_free(block_id)) > pool.num_free:
                return False
            held.append(found)
        wanted: list[Wanted] = []
        for g, (found, pool) in enumerate(zip(held, self._pools, strict=True)):
            needed, keys = self.points.needed(g, num_tokens), sequence.chains[g].keys
            pool.share(block_id for block_id in found if block_id is not None)
            fresh = iter(pool.allocate(found.count(None)))
            blocks = [next(fresh) if block_id is None else block_id for block_id in found]
            wanted += [Wanted(g, blocks[i - needed.start], keys[i]) for i in needed if found[i - needed.start] is None]
            sequence.tables[g] = [NULL_BLOCK] * needed.start + blocks
        self._set_capacity(sequence)
        sequence.filled = sequence.settled = num_tokens
        sequence.origins.update(self.tiers.load(request_id, wanted, num_spared))
        return True

    def transferred(self, done: TransferDone, now_s: float) -> list[str]:
        """A transfer ended: take in its blocks. Returns the requests that need not wait any longer."""
        ended = self.tiers.take_done(done, now_s)
        for request_id, complete in ended:
            if not complete:
                self.give_up_fill(request_id)
        return [request_id for request_id, _ in ended]

    def holds_fill(self, request_id: str) -> bool:
        """Whether a waiting request holds blocks that were loaded for it."""
        return bool(self._sequences[request_id].filled)

    def give_up_fill(self, request_id: str) -> None:
        """What did not arrive was not loaded. What did is on the device now, for the next match."""
        sequence = self._sequences[request_id]
        origins = sequence.origins.items()
        sequence.origins = {(g, key): tier for (g, key), tier in origins if self._pools[g].find(key) is not None}
        self.release(request_id)

    def sources(self, request_id: str, match: Match) -> Counter[Tier]:
        """From which tiers the tokens of `match` came, by the blocks of a group that keeps history."""
        sequence, g = self._sequences[request_id], self._history_first[0]
        if not sequence.origins:
            return Counter({"device": match.num_tokens})
        size = self.groups[g].block_size
        keys = sequence.chains[g].keys[: match.num_tokens // size]
        sources = Counter(sequence.origins.get((g, key), "device") for key in keys)
        return Counter({tier: count * size for tier, count in sources.items()})

    # Growth.

    def reserve(self, request_id: str, num_tokens: int, match: Match = NO_MATCH) -> BlockIds | None:
        """Grow the tables to hold `num_tokens` tokens in every group, or return None and change nothing.

        For a request without blocks the cached blocks of `match` come first, and the result is its whole table;
        later the result is what was appended.
        """
        sequence = self._sequences[request_id]
        if num_tokens <= sequence.capacity:
            return self._nothing
        shared = [self._shared_blocks(g, sequence, match.num_tokens) for g in range(len(self.groups))]
        missing = [
            ceil_div(num_tokens, group.block_size) - len(sequence.tables[g]) - len(shared[g])
            for g, group in enumerate(self.groups)
        ]
        for g, pool in enumerate(self._pools):
            revived = sum(1 for block_id in shared[g] if pool.is_free(block_id))
            if missing[g] + revived > pool.num_free:
                return None
        added = tuple(self._append(g, sequence, shared[g], missing[g]) for g in range(len(self.groups)))
        sequence.settled = max(sequence.settled, match.num_tokens)
        self._set_capacity(sequence)
        return added

    def will_fit(self, request_id: str, num_tokens: int) -> bool:
        """Whether a request can grow to `num_tokens` once blocks that are being stored in lower tiers are free."""
        sequence, coming = self._sequences[request_id], self.tiers.coming_free()
        return all(
            ceil_div(num_tokens, group.block_size) - len(sequence.tables[g]) <= self._pools[g].num_free + coming[g]
            for g, group in enumerate(self.groups)
        )

    def _set_capacity(self, sequence: SequenceState) -> None:
        tables = zip(self.groups, sequence.tables, strict=True)
        sequence.capacity = min(len(table) * group.block_size for group, table in tables)

    def _shared_blocks(self, g: int, sequence: SequenceState, num_tokens: int) -> list[int]:
        """Table entries of group g that a match of `num_tokens` gives: null before what is needed."""
        if num_tokens == 0 or sequence.tables[g]:
            return []
        keys, needed = sequence.chains[g].keys, self.points.needed(g, num_tokens)
        blocks = [self._pools[g].find(keys[i]) for i in needed]
        assert None not in blocks, f"the match of {num_tokens} tokens no longer holds in group {self.groups[g].name}"
        return [NULL_BLOCK] * needed.start + [b for b in blocks if b is not None]

    def _append(self, g: int, sequence: SequenceState, shared: list[int], missing: int) -> list[int]:
        pool = self._pools[g]
        pool.share(b for b in shared if b != NULL_BLOCK)
        added = shared + pool.allocate(max(0, missing))
        sequence.tables[g] += added
        return added

    def fits(self, request_id: str, match: Match, num_tokens: int, step_tokens: int, spare: float) -> bool:
        """Whether a request may grow to `num_tokens` with the blocks free now, leaving `spare` of each pool."""
        sequence = self._sequences[request_id]
        live = max_live_blocks(self.groups, num_tokens, step_tokens)
        for g, (most, pool) in enumerate(zip(live, self._pools, strict=True)):
            shared = self._shared_blocks(g, sequence, match.num_tokens)
            in_use = sum(1 for block_id in shared if block_id != NULL_BLOCK and not pool.is_free(block_id))
            in_use += len(self._live(g, sequence))
            needed = most - in_use
            if needed + int(pool.num_blocks * spare) > pool.num_free:
                return False
        return True

    def commit(self, request_id: str, tokens: array[int], num_computed: int, prompt_len: int) -> None:
        """Tokens [0, num_computed) are computed for certain: publish complete blocks, drop what is out of reach.

        Window and state blocks that end between two positions at which something can be resumed are not published.
        """
        sequence = self._sequences[request_id]
        if num_computed < sequence.due:
            return
        if not self.prefix_caching:
            self._settle(sequence, num_computed)
            return
        self._extend_keys(sequence, tokens)
        start, end = sequence.settled, min(num_computed, len(tokens) - self.points.lag)
        if start < end:
            for g in range(len(self.groups)):
                self._publish(g, sequence, tokens, start, end)
            if self._tail_groups:
                self._pass_checkpoints(sequence, start, end, prompt_len)
            self._settle(sequence, end)

    def _settle(self, sequence: SequenceState, num_tokens: int) -> None:
        """Nothing before `num_tokens` is left to publish: drop what nobody needs who goes on from there."""
        for g in self._tail_groups:
            first, end = (self.points.needed(g, n).start for n in (sequence.settled, num_tokens))
            if first < end:
                self._pools[g].free(sequence.tables[g][first:end])
                sequence.tables[g][first:end] = [NULL_BLOCK] * (end - first)
        sequence.settled = num_tokens
        sequence.due = min(self.points.change(g, num_tokens) for g in range(len(self.groups)))

    def _live(self, g: int, sequence: SequenceState) -> list[int]:
        """The part of a table that is not given back yet."""
        return sequence.tables[g][self.points.needed(g, sequence.settled).start :]

    def _publish(self, g: int, sequence: SequenceState, tokens: array[int], start: int, end: int) -> None:
        """Publish what is of use of the blocks of group g that end in (start, end]."""
        keys, table, pool = sequence.chains[g].keys, sequence.tables[g], self._pools[g]
        keep = self.tiers.tiers and self.groups[g].keeps_history
        for i in self.points.useful(g, start, end):
            pool.publish(table[i], keys[i])
            if keep:
                pool.keep(table[i])
            if self._events is not None:
                self._describe(g, sequence, tokens, i)

    def _describe(self, g: int, sequence: SequenceState, tokens: array[int], i: int) -> None:
        """Say what is in block i of a request, if a tier holds it and that is not known."""
        keys, size, events = sequence.chains[g].keys, self.groups[g].block_size, self._events
        assert events is not None
        if events.lacks(g, keys[i]):
            content = tokens[i * size : (i + 1) * size].tobytes()
            events.describe(g, keys[i], (keys[i - 1] if i else b"", content, sequence.salted))

    def _pass_checkpoints(self, sequence: SequenceState, start: int, end: int, prompt_len: int) -> None:
        """Keep the tails of checkpoints in (start, end] in lower tiers, and hold those of the last position."""
        for position in self.points.checkpoints(start, end, prompt_len):
            self._keep_tails(sequence, position)
        position = self.points.last(end)
        if position > sequence.held:
            sequence.held = position
            for g in self._tail_groups:
                tail = self._tail(g, sequence, position)
                self._pools[g].share(tail)
                self._pools[g].free(sequence.tails[g])
                sequence.tails[g] = tail

    def _tail(self, g: int, sequence: SequenceState, position: int) -> list[int]:
        """Blocks of group g, this request's or others', that hold what resuming at a settled position needs."""
        found = (self._pools[g].find(sequence.chains[g].keys[i]) for i in self.points.needed(g, position))
        return [block_id for block_id in found if block_id is not None]

    def _keep_tails(self, sequence: SequenceState, position: int) -> None:
        """Have what resuming at a settled position needs stored in lower tiers once nobody refers to it."""
        for g in self._tail_groups if self.tiers.tiers else ():
            for block_id in self._tail(g, sequence, position):
                self._pools[g].keep(block_id)

    def release(self, request_id: str) -> None:
        """Give back all blocks of a request in every group; it may reserve again. Unknown ids are ignored.

        The tails of the last position at which it could be resumed are kept in lower tiers.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        self.tiers.abandon(request_id)
        self._keep_tails(sequence, sequence.held)
        for g, pool in enumerate(self._pools):
            pool.free(sequence.tails[g])
            pool.free(self._live(g, sequence))
        sequence.clear()

    def demote(self, request_id: str, now_s: float) -> None:
        """Release a preempted request, and have its blocks stored in lower tiers before others use them."""
        sequence = self._sequences[request_id]
        keys = [
            (g, key)
            for g, pool in enumerate(self._pools)
            for block_id in reversed([*sequence.tails[g], *self._live(g, sequence)])
            if (key := pool.key(block_id)) is not None
        ]
        self.release(request_id)
        if self.tiers.tiers:
            self.tiers.demote([(g, key) for g, key in keys if self._is_released(g, key)], now_s)

    def _is_released(self, g: int, key: bytes) -> bool:
        return self._pools[g].find(key) in self._pools[g].released

    def forget(self, request_id: str) -> None:
        """Release a request for good."""
        self.release(request_id)
        self._sequences.pop(request_id, None)

    def open(self, num_blocks: tuple[int, ...], fingerprint: bytes, inventories: Sequence[TierInventory] = ()) -> None:
        """A new device life: `num_blocks` empty blocks per group, all requests without blocks, and what stores hold."""
        self.fingerprint = fingerprint
        if self._events is not None:
            self._events.cleared("device")
        self._pools = [BlockPool(count, pool_events(self._events, "device", g)) for g, count in enumerate(num_blocks)]
        self._sequences.clear()
        self.tiers.open(self._pools, inventories)

    def clear(self, tiers: Collection[Tier]) -> None:
        """Forget cached blocks of some tiers. Running requests keep what they use; nobody else finds it."""
        self.tiers.clear(tiers)
        if "device" in tiers:
            for pool in self._pools:
                pool.drop_all()

    def take_events(self) -> list[KVEvent]:
        """What happened to cached blocks since the last call, in order."""
        return [] if self._events is None else self._events.take()

    def usage(self) -> tuple[float, ...]:
        """Share of each group's blocks that requests hold, in [0, 1]; those that are only being stored do not count."""
        pools = zip(self._pools, self.tiers.coming_free(), strict=True)
        return tuple(1 - (pool.num_free + coming) / pool.num_blocks for pool, coming in pools)

    def num_blocks_in_use(self) -> tuple[int, ...]:
        return tuple(pool.num_blocks - pool.num_free for pool in self._pools)

    def table(self, request_id: str) -> BlockIds:
        """Copy of a request's block table."""
        return tuple(list(table) for table in self._sequences[request_id].tables)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def check(self) -> None:
        """Assert in every group: free + cached + in use = total, and references equal table entries."""
        for g, pool in enumerate(self._pools):
            references: Counter[int] = Counter()
            for sequence in self._sequences.values():
                live = self._live(g, sequence)
                assert NULL_BLOCK not in live, f"null block inside the live part of group {self.groups[g].name}"
                references.update(live)
                references.update(sequence.tails[g])
            references.update(self.tiers.references(g))
            pool.check(references)
        self.tiers.check()

    def _sequence(self, request_id: str, cache_salt: str) -> SequenceState:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            chains = [KeyChain(group, root_key(group, self.fingerprint, cache_salt)) for group in self.groups]
            sequence = self._sequences[request_id] = SequenceState(chains, salted=bool(cache_salt))
        return sequence

    def _extend_keys(self, sequence: SequenceState, tokens: array[int]) -> None:
        with memoryview(tokens) as view, view.cast("B") as data:
            for chain in sequence.chains:
                chain.extend(data)
