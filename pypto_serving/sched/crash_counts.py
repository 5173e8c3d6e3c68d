"""CrashCounts: count the worker crashes that each request may have caused."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

ALONE_CRASHES = 2
"""After this many crashes, a request is a suspect, and runs alone in its steps."""
MAX_CRASHES = 3
"""After this many crashes a request fails."""


@dataclass(slots=True)
class _Suspicion:
    """The tokens [start, end) of one request were part of `count` crashed steps."""

    count: int
    start: int
    end: int


class CrashCounts:
    """The crashed steps of unfinished requests, by request id. Owned and changed by the Scheduler.

    A request's count grows by one when a step that computes its tokens crashes.

    The tokens that crash a kernel lie in every crashed interval. So a crash whose interval does not overlap the earlier
    ones restarts the count, and a request is cleared once the interval is committed. Drafts belong to the interval.
    A suspect gets no drafts, so no request fails because of its drafts.
    """

    def __init__(self) -> None:
        self._suspicions: dict[str, _Suspicion] = {}

    def __len__(self) -> int:
        return len(self._suspicions)

    @property
    def suspects(self) -> list[str]:
        """Return the ids of requests that must run alone."""
        return [request_id for request_id, found in self._suspicions.items() if found.count >= ALONE_CRASHES]

    def add(self, request_id: str, start: int, end: int) -> int:
        """Record that a step with tokens [start, end) of a request crashed. Return the request's count."""
        found = self._suspicions.get(request_id)
        if found is not None and start < found.end and found.start < end:
            found.count += 1
            found.start, found.end = max(start, found.start), min(end, found.end)
        else:
            found = self._suspicions[request_id] = _Suspicion(1, start, end)
        return found.count

    def clear_committed(self, request_id: str, num_committed: int) -> None:
        """Clear a request if its suspicious tokens are committed."""
        found = self._suspicions.get(request_id)
        if found is not None and num_committed >= found.end:
            self.forget(request_id)

    def forget(self, request_id: str) -> None:
        """Clear a request."""
        self._suspicions.pop(request_id, None)

    def check(self, unfinished: Set[str]) -> None:
        """Assert that only unfinished requests are counted."""
        assert self._suspicions.keys() <= unfinished, "a finished request has a crash count"
