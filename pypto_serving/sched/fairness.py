"""Fairness between cache salts: the next request to start is one of the salt that got the fewest tokens.

A virtual token counter for each salt, as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pypto_serving.sched.request import Request
from pypto_serving.sched.step import Scheduled


class TokenShares:
    """Tokens computed for each salt that has unfinished requests. Owned by the Scheduler. Cached tokens are free.

    A salt without requests is forgotten. When it has some again, it begins with what the salt with the fewest tokens
    has: time without requests gives no claim.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()

    def __getitem__(self, salt: str) -> int:
        return self._num_tokens[salt]

    def rank(self, request: Request) -> tuple[int, int, int]:
        """Return what decides which of several requests starts: priority, then tokens of the salt, then arrival."""
        priority, arrival = request.order
        return priority, self._num_tokens[request.source.cache_salt], arrival

    def __len__(self) -> int:
        return len(self._num_tokens)

    def enter(self, request: Request) -> None:
        """Count a request that arrived."""
        salt = request.source.cache_salt
        if salt not in self._num_tokens:
            self._num_tokens[salt] = min(self._num_tokens.values(), default=0)
        self._num_requests[salt] += 1

    def leave(self, request: Request) -> None:
        """Count a request that ended."""
        salt = request.source.cache_salt
        self._num_requests[salt] -= 1
        if not self._num_requests[salt]:
            del self._num_requests[salt], self._num_tokens[salt]

    def charge(self, scheduled: Iterable[Scheduled]) -> None:
        """Count the tokens of a step."""
        for entry in scheduled:
            self._num_tokens[entry.request.source.cache_salt] += entry.count + entry.num_drafts
