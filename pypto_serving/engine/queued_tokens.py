"""QueuedTokens: how many prompt tokens wait in front of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from pypto_serving.types.arrays import ID_BYTES
from pypto_serving.types.request import EngineRequest


class QueuedTokens:
    """Counts the prompt tokens of requests without a first token. Owned by AsyncEngine.

    A prompt shared by several requests of a submission counts once, until the first of them has a token. A prompt fits
    if nothing else waits, however long it is.
    """

    def __init__(self, max_tokens: int) -> None:
        """Allow at most `max_tokens`; 0 turns the limit and the counting off."""
        self._max_tokens = max_tokens
        self._tokens: dict[str, int] = {}
        self.num_tokens = 0

    def fits(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more may wait."""
        return not self._max_tokens or not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens

    def enter(self, requests: Sequence[EngineRequest]) -> None:
        """Count the prompts of one submission."""
        if not self._max_tokens:
            return
        for ids, run in groupby(requests, attrgetter("token_ids")):
            self._tokens[next(run).request_id] = len(ids) // ID_BYTES
            self.num_tokens += len(ids) // ID_BYTES

    def leave(self, request_id: str) -> None:
        """Count a request no longer, since it has a token or ended. Ignore it if it is not counted."""
        self.num_tokens -= self._tokens.pop(request_id, 0)

    def forget_all(self) -> None:
        """Count nothing."""
        self._tokens.clear()
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return how many prompts wait."""
        return len(self._tokens)
