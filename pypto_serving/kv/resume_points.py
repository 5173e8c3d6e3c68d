"""ResumePoints: the positions at which sequences can be resumed, and those of them that are checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pypto_serving.types.kv import CHECKPOINT_TOKENS, KVCacheGroupSpec, publication_lag, resume_step
from pypto_serving.util import ceil_div


class ResumePoints:
    """Multiples of `step`: a block ends there in every group, so a sequence can be resumed there. Never changes.

    Every `interval` tokens lies a checkpoint that all sequences share: CHECKPOINT_TOKENS, rounded up to a resume point.
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

        The latter also at `start`: another request may have computed the whole prompt without keeping its end.
        """
        yield from range(start // self.interval * self.interval + self.interval, end + 1, self.interval)
        if start <= self.last(prompt_len) <= end:
            yield self.last(prompt_len)
