"""QueuedTokens: how many prompt tokens wait in front of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter

from pypto_serving.types.request import EngineRequest
from pypto_serving.types.tokens import ID_BYTES


class QueuedTokens:
    """Counts the prompt tokens of requests without a first token. Owned by AsyncEngine.

    A prompt that several requests of one submission continue counts once, until the first of them has a token. A prompt
    fits if nothing else waits, however long it is.
    """

    def __init__(self, most: int) -> None:
        """Allow at most so many tokens; 0 is no limit, and then none are counted."""
        self._most = most
        self._tokens: dict[str, int] = {}
        self.num_tokens = 0

    def fits(self, num_tokens: int) -> bool:
        """Return whether so many more tokens may wait."""
        return not self._most or not self.num_tokens or self.num_tokens + num_tokens <= self._most

    def enter(self, requests: Sequence[EngineRequest]) -> None:
        """Count the prompts of one submission."""
        if not self._most:
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
