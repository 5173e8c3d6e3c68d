"""WaitingQueue: choose the waiting request to start next, in order or fairly. Deadlines: find expired requests."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from pypto_serving.sched.request import Request, by_order
from pypto_serving.sched.step import Scheduled


class TokenShares:
    """Tokens computed for each salt with unfinished requests, not counting cached ones. Owned by the Scheduler.

    A salt without requests is forgotten. When it has requests again, it starts with the smallest count of any salt, so
    that idle time gives no advantage.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._num_requests: Counter[str] = Counter()

    def __getitem__(self, salt: str) -> int:
        return self._num_tokens[salt]

    def rank(self, request: Request) -> tuple[int, int, int]:
        """Return the sort key of a request for starting: priority, then tokens of its salt, then arrival."""
        priority, arrival = request.order
        return priority, self._num_tokens[request.source.cache_salt], arrival

    def __len__(self) -> int:
        return len(self._num_tokens)

    def enter(self, request: Request) -> None:
        """Add an arriving request to the count of its salt."""
        salt = request.source.cache_salt
        if salt not in self._num_tokens:
            self._num_tokens[salt] = min(self._num_tokens.values(), default=0)
        self._num_requests[salt] += 1

    def leave(self, request: Request) -> None:
        """Remove an ended request from the count of its salt."""
        salt = request.source.cache_salt
        self._num_requests[salt] -= 1
        if not self._num_requests[salt]:
            del self._num_requests[salt], self._num_tokens[salt]

    def charge(self, scheduled: Iterable[Scheduled]) -> None:
        """Add the tokens of a step to their salts."""
        for entry in scheduled:
            self._num_tokens[entry.request.source.cache_salt] += entry.count + entry.num_drafts


_SLACK = 16
"""A heap may hold twice as many entries as requests, plus this many."""


class RequestHeap:
    """Requests by unique keys, the smallest first. Each call costs O(log n) on average.

    A removed request is forgotten at once. Its heap entries, which contain only its id, are dropped when they reach the
    top, or when there are too many.
    """

    def __init__(self, key: Callable[[Request], Any]) -> None:
        self._key = key
        self._heap: list[tuple[Any, str]] = []
        self._requests: dict[str, Request] = {}

    def push(self, request: Request) -> None:
        """Add a request."""
        self._requests[request.id] = request
        heapq.heappush(self._heap, (self._key(request), request.id))

    def first(self) -> Request | None:
        """Return the request with the smallest key, or None."""
        while self._heap:
            key, request_id = self._heap[0]
            request = self._requests.get(request_id)
            if request is not None and self._key(request) == key:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Remove a request; do nothing if it is not here."""
        self._requests.pop(request.id, None)
        if len(self._heap) > 2 * len(self._requests) + _SLACK:
            self._heap = sorted((self._key(each), each.id) for each in self)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in no particular order."""
        return iter(self._requests.values())


class WaitingQueue:
    """Requests that may start, by priority and then by arrival. Owned by the Scheduler.

    With `shares`, requests of equal priority are ordered by the tokens that their salt got, fewest first. These change
    with every step, so each salt has its own heap, and `peek` compares the first requests of all heaps.
    """

    def __init__(self, shares: TokenShares | None = None) -> None:
        self._shares = shares
        self._by_salt: dict[str, RequestHeap] = {}

    def _salt_of(self, request: Request) -> str:
        return "" if self._shares is None else request.source.cache_salt

    def push(self, request: Request) -> None:
        """Add a request."""
        salt = self._salt_of(request)
        if salt not in self._by_salt:
            self._by_salt[salt] = RequestHeap(by_order)
        self._by_salt[salt].push(request)

    def remove(self, request: Request) -> None:
        """Remove a request; do nothing if it is not in the queue."""
        heap = self._by_salt.get(self._salt_of(request))
        if heap is not None:
            heap.remove(request)
            if not heap:
                del self._by_salt[self._salt_of(request)]

    def peek(self) -> Request | None:
        """Return the first request, or None."""
        firsts = (request for heap in self._by_salt.values() if (request := heap.first()) is not None)
        return min(firsts, key=by_order if self._shares is None else self._shares.rank, default=None)

    def __len__(self) -> int:
        return sum(map(len, self._by_salt.values()))

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in no particular order."""
        return (request for heap in self._by_salt.values() for request in heap)


class Deadlines:
    """Requests with deadlines, in any state. Owned by the Scheduler."""

    def __init__(self) -> None:
        self._heap = RequestHeap(lambda request: (request.source.deadline_s, request.order))

    def add(self, request: Request) -> None:
        """Add an arriving request, if it has a deadline."""
        if request.source.deadline_s is not None:
            self._heap.push(request)

    def remove(self, request: Request) -> None:
        """Remove an ended request."""
        self._heap.remove(request)

    def take_expired(self, now_s: float) -> Iterator[Request]:
        """Remove and yield the requests whose deadline has passed."""
        while (request := self._heap.first()) is not None:
            deadline_s = request.source.deadline_s
            if deadline_s is None or deadline_s > now_s:
                return
            self._heap.remove(request)
            yield request
