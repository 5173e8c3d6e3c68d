"""ResumePoints: where sequences can be resumed, and which blocks of each group that needs."""

from __future__ import annotations

from collections.abc import Iterator

from pypto_serving.types.kv import CHECKPOINT_TOKENS, KVCacheGroupSpec, publication_lag, resume_step
from pypto_serving.util import ceil_div


class ResumePoints:
    """Positions at which a block ends in every group: there, and only there, sequences can be resumed. Never changes.

    `interval` is the distance of the checkpoints that all sequences have in common: CHECKPOINT_TOKENS, or the next
    position after it. Tokens are settled, so that their blocks can be published, once `lag` more are known.
    """

    def __init__(self, groups: tuple[KVCacheGroupSpec, ...]) -> None:
        self.groups = groups
        self.lag = publication_lag(groups)
        self._step = resume_step(groups)
        self.interval = ceil_div(CHECKPOINT_TOKENS, self._step) * self._step

    def last(self, num_tokens: int) -> int:
        """The last one at or before `num_tokens`."""
        return num_tokens - num_tokens % self._step

    def needed(self, g: int, num_tokens: int) -> range:
        """Blocks of group g, of the complete ones of `num_tokens` tokens, that resuming there needs."""
        size = self.groups[g].block_size
        end = num_tokens // size
        return range(min(end, self.groups[g].first_needed(num_tokens) // size), end)

    def change(self, g: int, num_tokens: int) -> int:
        """How many tokens, after `num_tokens`, it takes until a block of group g is complete or not needed any more."""
        group = self.groups[g]
        complete = (num_tokens // group.block_size + 1) * group.block_size
        if group.kind != "sliding_window":
            return complete
        return min(complete, (self.needed(g, num_tokens).start + 1) * group.block_size + group.window - 1)

    def useful(self, g: int, start: int, end: int) -> Iterator[int]:
        """Blocks of group g that end in (start, end] and are needed to resume somewhere, be it after `end`."""
        size = self.groups[g].block_size
        first, stop = start // size, end // size
        if self.groups[g].keeps_history:
            yield from range(first, stop)
            return
        position = self.last(start)
        while first < stop:
            position += self._step
            needed = self.needed(g, position)
            yield from range(max(first, needed.start), min(stop, needed.stop))
            first = max(first, needed.stop)

    def checkpoints(self, start: int, end: int, prompt_len: int) -> Iterator[int]:
        """Positions in (start, end] whose tails are kept: multiples of `interval`, and the end of the prompt.

        The latter also at `start`: others may have computed all of the prompt, and gone on without keeping its end.
        """
        yield from range(start // self.interval * self.interval + self.interval, end + 1, self.interval)
        if start <= self.last(prompt_len) <= end:
            yield self.last(prompt_len)
