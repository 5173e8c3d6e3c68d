"""KVCacheManager: owner of block tables; decides which blocks a request uses, in all groups at once."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from dataclasses import dataclass

from pypto_serving.kv.pool import NULL_BLOCK, BlockPool
from pypto_serving.kv.prefix import KeyChain, root_key
from pypto_serving.types.kv import KVCacheGroupSpec
from pypto_serving.util import ceil_div

BlockIds = tuple[list[int], ...]
"""Block ids per group, in order of position."""


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache holds of a request: `num_tokens` can be taken over now, from the device."""

    num_tokens: int


NO_MATCH = Match(0)


class _Sequence:
    """Tables and keys of one request. `live_from[g]`, `published[g]` are block indices, monotonic while it runs.

    Up to `capacity` tokens nothing needs to be reserved, and before `due` computed tokens a commit has nothing to do.
    """

    __slots__ = ("capacity", "chains", "due", "live_from", "published", "tables")

    def __init__(self, chains: list[KeyChain]) -> None:
        self.chains = chains
        self.clear()

    def clear(self) -> None:
        self.tables: list[list[int]] = [[] for _ in self.chains]
        self.live_from = [0] * len(self.chains)
        self.published = [0] * len(self.chains)
        self.capacity = 0
        self.due = 0


class KVCacheManager:
    """Owns the block tables of all requests; block i of a table holds tokens [i * B, (i + 1) * B).

    Blocks before `KVCacheGroupSpec.first_needed` are given back at commit and leave a null entry. A request's life:
    match* → reserve → (reserve | commit)* → release → ... → forget. Nothing here does I/O or reads a clock.
    """

    def __init__(
        self,
        groups: tuple[KVCacheGroupSpec, ...],
        num_blocks: tuple[int, ...],
        *,
        prefix_caching: bool = True,
        fingerprint: bytes = b"",
    ) -> None:
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.fingerprint = fingerprint
        self._pools = [BlockPool(count) for count in num_blocks]
        self._sequences: dict[str, _Sequence] = {}
        self._nothing: BlockIds = tuple([] for _ in groups)
        self._history_first = sorted(range(len(groups)), key=lambda g: not groups[g].keeps_history)

    def match(self, request_id: str, tokens: array[int], cache_salt: str = "") -> Match:
        """Longest prefix of `tokens` that every group accepts, at most all but one token. Changes no block.

        Each group shrinks the candidate by its own rule until none objects.
        """
        sequence = self._sequence(request_id, cache_salt)
        if not self.prefix_caching:
            return NO_MATCH
        self._extend_keys(sequence, tokens)
        candidate, agreed = len(tokens) - 1, -1
        while candidate != agreed:
            agreed = candidate
            for g in self._history_first:
                candidate = self._longest_accepted(g, sequence.chains[g].keys, candidate)
        return Match(candidate)

    def _longest_accepted(self, g: int, keys: list[bytes], limit: int) -> int:
        """Largest n <= limit at which group g can resume."""
        group, find = self.groups[g], self._pools[g].find
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
        tables = zip(self.groups, sequence.tables, strict=True)
        sequence.capacity = min(len(table) * group.block_size for group, table in tables)
        return added

    def _shared_blocks(self, g: int, sequence: _Sequence, num_tokens: int) -> list[int]:
        """Table entries of group g that a match of `num_tokens` gives: null before what is needed."""
        if num_tokens == 0 or sequence.tables[g]:
            return []
        group, keys = self.groups[g], sequence.chains[g].keys
        end = num_tokens // group.block_size
        first = min(end, group.first_needed(num_tokens) // group.block_size)
        blocks = [self._pools[g].find(key) for key in keys[first:end]]
        assert None not in blocks, f"the match of {num_tokens} tokens no longer holds in group {group.name}"
        return [NULL_BLOCK] * first + [b for b in blocks if b is not None]

    def _append(self, g: int, sequence: _Sequence, shared: list[int], missing: int) -> list[int]:
        pool = self._pools[g]
        pool.share(b for b in shared if b != NULL_BLOCK)
        added = shared + pool.allocate(max(0, missing))
        if shared:
            sequence.live_from[g] = shared.count(NULL_BLOCK)
            sequence.published[g] = len(shared)
        sequence.tables[g] += added
        return added

    def fits(self, request_id: str, match: Match, num_tokens: int, step_tokens: int, spare: float) -> bool:
        """Whether a request may grow to `num_tokens` with the blocks free now, leaving `spare` of each pool."""
        sequence = self._sequences[request_id]
        for g, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            shared = self._shared_blocks(g, sequence, match.num_tokens)
            in_use = sum(1 for block_id in shared if block_id != NULL_BLOCK and not pool.is_free(block_id))
            needed = group.max_live_blocks(num_tokens, step_tokens) - in_use
            if needed + int(pool.num_blocks * spare) > pool.num_free:
                return False
        return True

    def commit(self, request_id: str, tokens: array[int], num_computed: int) -> None:
        """Tokens [0, num_computed) are computed for certain: publish complete blocks, drop what is out of reach."""
        sequence = self._sequences[request_id]
        if num_computed < sequence.due:
            return
        if self.prefix_caching:
            self._extend_keys(sequence, tokens)
            for g in range(len(self.groups)):
                self._publish(g, sequence, num_computed)
        for g, group in enumerate(self.groups):
            if not group.keeps_history:
                self._drop_before(g, sequence, group.first_needed(num_computed) // group.block_size)
        sequence.due = min(self._due(g, sequence, num_computed) for g in range(len(self.groups)))

    def _due(self, g: int, sequence: _Sequence, num_computed: int) -> int:
        """Computed tokens at which group g has a block to publish or may have one to drop."""
        group = self.groups[g]
        if not group.keeps_history:
            return num_computed + 1
        return (sequence.published[g] + 1) * group.block_size if self.prefix_caching else sys.maxsize

    def _publish(self, g: int, sequence: _Sequence, num_computed: int) -> None:
        keys, table = sequence.chains[g].keys, sequence.tables[g]
        end = min(num_computed // self.groups[g].block_size, len(keys))
        for i in range(sequence.published[g], end):
            if table[i] != NULL_BLOCK:
                self._pools[g].publish(table[i], keys[i])
        sequence.published[g] = max(sequence.published[g], end)

    def _drop_before(self, g: int, sequence: _Sequence, index: int) -> None:
        table, start = sequence.tables[g], sequence.live_from[g]
        index = min(index, len(table))
        if index > start:
            self._pools[g].free(table[start:index])
            table[start:index] = [NULL_BLOCK] * (index - start)
            sequence.live_from[g] = index

    def release(self, request_id: str) -> None:
        """Give back all blocks of a request in every group; it may reserve again. Unknown ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        for g, pool in enumerate(self._pools):
            pool.free(sequence.tables[g][sequence.live_from[g] :])
        sequence.clear()

    def forget(self, request_id: str) -> None:
        """Release a request for good."""
        self.release(request_id)
        self._sequences.pop(request_id, None)

    def open(self, num_blocks: tuple[int, ...], fingerprint: bytes) -> None:
        """A new device life: `num_blocks` empty blocks per group, nothing cached, all requests without blocks."""
        self.fingerprint = fingerprint
        self._pools = [BlockPool(count) for count in num_blocks]
        self._sequences.clear()

    def usage(self) -> tuple[float, ...]:
        """Share of each group's blocks that requests hold, in [0, 1]."""
        return tuple(1 - pool.num_free / pool.num_blocks for pool in self._pools)

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
                live = sequence.tables[g][sequence.live_from[g] :]
                assert NULL_BLOCK not in live, f"null block inside the live part of group {self.groups[g].name}"
                references.update(live)
            pool.check(references)

    def _sequence(self, request_id: str, cache_salt: str) -> _Sequence:
        sequence = self._sequences.get(request_id)
        if sequence is None:
            chains = [KeyChain(group, root_key(group, self.fingerprint, cache_salt)) for group in self.groups]
            sequence = self._sequences[request_id] = _Sequence(chains)
        return sequence

    def _extend_keys(self, sequence: _Sequence, tokens: array[int]) -> None:
        with memoryview(tokens) as view, view.cast("B") as data:
            for chain in sequence.chains:
                chain.extend(data)
