"""KVGroup: the rules of one KV group, and its blocks on the device; ResumePoints: where sequences can be resumed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from pypto_serving.kv.events import EventLog
from pypto_serving.kv.keys import Keys
from pypto_serving.kv.pool import BlockPool
from pypto_serving.types.kv import (
    CHECKPOINT_TOKENS,
    GroupSpec,
    KVCacheGroupSpec,
    RecentSpec,
    publication_lag,
    resume_step,
)
from pypto_serving.util import ceil_div


class ResumePoints:
    """Multiples of `step`. In every group a block ends there, so a sequence can be resumed there. Immutable.

    All sequences have a checkpoint every `interval` tokens: CHECKPOINT_TOKENS, rounded up to a resume point.
    A computed token can be committed, and its blocks published, once `lag` more tokens are known.
    """

    def __init__(self, specs: Sequence[KVCacheGroupSpec]) -> None:
        self.lag = publication_lag(specs)
        self.step = resume_step(specs)
        self.interval = ceil_div(CHECKPOINT_TOKENS, self.step) * self.step

    def last(self, num_tokens: int) -> int:
        """Return the last resume point at or before `num_tokens`."""
        return num_tokens - num_tokens % self.step

    def checkpoints(self, start: int, end: int, prompt_len: int) -> Iterator[int]:
        """Yield the checkpoints in (start, end]: multiples of `interval`, and the last point of the prompt.

        Yield the latter even at `start`: another request may have computed the whole prompt without keeping its end.
        """
        yield from range(start // self.interval * self.interval + self.interval, end + 1, self.interval)
        if start <= self.last(prompt_len) <= end:
            yield self.last(prompt_len)


Find = Callable[[bytes], object | None]
"""Returns the place of the block with a key, or None."""


class KVGroup(ABC):
    """Owns the pool of one group on the device, and implements the rules of the group's kind.

    Block i of a sequence holds tokens [i * B, (i + 1) * B), B = `block_size`. At n computed tokens:

        blocks  |   0   |   1   |   2   |   3   |   4   |
        rows               [-----------------)              [first_needed(n), n): what later tokens read
        needed          [---------------)                   complete blocks with such rows: 1 and 2
        passed  [-------)                                   blocks without such rows: 0

    `index` is the group's index in block tables and messages.
    """

    def __init__(self, index: int, spec: KVCacheGroupSpec, points: ResumePoints, events: EventLog | None) -> None:
        self.index = index
        self.spec: GroupSpec = spec
        self.keeps_history = spec.keeps_history
        self.block_size = spec.block_size
        self.run = spec.run
        self._run_tokens = spec.run * spec.block_size
        self.block_bytes = spec.block_bytes
        self.pool: BlockPool
        self._points = points
        self._events = events

    def open(self, num_blocks: int) -> None:
        """Start over with an empty pool of `num_blocks` blocks."""
        self.pool = BlockPool(num_blocks, self._events, "device", self.index)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return ceil_div(num_tokens, self.block_size)

    def missing(self, capacity: int, num_tokens: int) -> int:
        """Count the blocks to add to a table that holds `capacity` tokens so that it holds `num_tokens`.

        Fewer blocks than a run are rounded up to the end of a run.
        """
        count = -((capacity - num_tokens) // self.block_size)
        if 0 < count < self.run:
            count = (ceil_div(num_tokens, self._run_tokens) * self._run_tokens - capacity) // self.block_size
        return count

    def live_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the largest number of blocks of a request of `num_tokens`, `step_tokens` of them not committed."""
        return self.spec.live_blocks(num_tokens, step_tokens, self._points.step)

    def first_needed(self, num_tokens: int) -> int:
        """Return the first block that resuming at `num_tokens` needs."""
        return self.spec.first_needed(num_tokens) // self.block_size

    def needed(self, num_tokens: int) -> range:
        """Return the complete blocks of `num_tokens` tokens that resuming there needs."""
        return range(self.first_needed(num_tokens), num_tokens // self.block_size)

    @abstractmethod
    def accepted(self, keys: Keys, limit: int, find: Find) -> int:
        """Return the last resume point n <= `limit` at which this group can resume with the blocks that `find` returns.

        `keys[i]` is the key of block i. Other groups may not accept n.
        """

    @abstractmethod
    def passed_at(self, block: int) -> float:
        """Return the number of committed tokens from which on block `block` and all earlier ones are not needed."""

    @abstractmethod
    def useful(self, start: int, end: int) -> Iterator[int]:
        """Yield the blocks that end in (start, end] and are needed at some resume point, which may lie after `end`."""


class HistoryGroup(KVGroup):
    """Full or compressed attention: every block of [0, n) is needed to resume at n."""

    def accepted(self, keys: Keys, limit: int, find: Find) -> int:
        """Return the last resume point before the first missing block."""
        last = min(limit // self.block_size, len(keys))
        missing = next((i for i in range(last) if find(keys[i]) is None), last)
        return self._points.last(missing * self.block_size)

    def passed_at(self, block: int) -> float:
        return math.inf

    def useful(self, start: int, end: int) -> Iterator[int]:
        yield from range(start // self.block_size, end // self.block_size)


class RecentGroup(KVGroup):
    """A sliding window or rolling state: the blocks from `spec.first_needed(n)` on are needed to resume at n."""

    spec: RecentSpec

    def accepted(self, keys: Keys, limit: int, find: Find) -> int:
        """Return the last resume point with all of its needed blocks.

        If a candidate lacks a block, all earlier candidates after that block need it, too, so they are skipped.
        """
        last = self._points.last(min(limit, len(keys) * self.block_size))
        while last > 0:
            missing = next((i for i in reversed(self.needed(last)) if find(keys[i]) is None), None)
            if missing is None:
                break
            last = self._points.last(missing * self.block_size)
        return last

    def passed_at(self, block: int) -> float:
        return self.spec.last_reader((block + 1) * self.block_size - 1) + 1

    def useful(self, start: int, end: int) -> Iterator[int]:
        size, first_needed = self.block_size, self.spec.first_needed
        first, stop = start // size, end // size
        position = self._points.last(start)
        while first < stop:
            position += self._points.step
            ended = position // size
            yield from range(max(first, first_needed(position) // size), min(stop, ended))
            first = ended


GroupKey = tuple[KVGroup, bytes]
"""A block by group and key."""


def make_groups(
    specs: Sequence[KVCacheGroupSpec], points: ResumePoints, events: EventLog | None
) -> tuple[KVGroup, ...]:
    """Return one object for each spec; their pools must be opened before use."""
    kinds: list[type[KVGroup]] = [HistoryGroup if spec.keeps_history else RecentGroup for spec in specs]
    return tuple(kind(g, spec, points, events) for g, (kind, spec) in enumerate(zip(kinds, specs, strict=True)))
