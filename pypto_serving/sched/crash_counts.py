"""CrashCounts: which requests may have crashed the worker, and what follows."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

ALONE_STRIKES = 2
"""With this many strikes a request runs in steps of its own."""
MAX_STRIKES = 3
"""With this many strikes a request fails."""


@dataclass(slots=True)
class _Strike:
    """Crashed steps that the tokens [start, end) of one request can all explain."""

    count: int
    start: int
    end: int


class CrashCounts:
    """The strikes of unfinished requests, by request id. Owned and changed by the Scheduler.

    A request gets a strike when a step that computes its tokens crashes:

        1 strike      no consequence
        2 strikes     suspect: runs alone (`ALONE_STRIKES`)
        3 strikes     fails (`MAX_STRIKES`)

    The tokens that crash a kernel lie in every interval that crashed. So a crash whose interval does not overlap the
    earlier ones starts the count again, and a request is cleared once the interval is committed. Drafts are part of the
    interval, since a step computes them like other tokens. A suspect has none, so no request fails for its drafts.
    """

    def __init__(self) -> None:
        self._strikes: dict[str, _Strike] = {}
        self._suspects: set[str] = set()

    def __len__(self) -> int:
        return len(self._strikes)

    @property
    def suspects(self) -> Set[str]:
        """Ids of the requests that must run alone."""
        return self._suspects

    def add(self, request_id: str, start: int, end: int) -> int:
        """Record that a step with tokens [start, end) of a request crashed; return the request's strikes."""
        strike = self._strikes.get(request_id)
        if strike is not None and start < strike.end and strike.start < end:
            strike.count += 1
            strike.start, strike.end = max(start, strike.start), min(end, strike.end)
        else:
            strike = self._strikes[request_id] = _Strike(1, start, end)
        if strike.count >= ALONE_STRIKES:
            self._suspects.add(request_id)
        else:
            self._suspects.discard(request_id)
        return strike.count

    def clear_committed(self, request_id: str, num_committed: int) -> None:
        """Clear a request if its suspect tokens are committed."""
        strike = self._strikes.get(request_id)
        if strike is not None and num_committed >= strike.end:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Remove all strikes of a request."""
        self._strikes.pop(request_id, None)
        self._suspects.discard(request_id)

    def check(self, unfinished: Set[str]) -> None:
        """Assert that only unfinished requests have strikes."""
        assert self._suspects <= self._strikes.keys() <= unfinished, "a finished request has strikes"
