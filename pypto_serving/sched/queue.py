"""WaitingQueue: waiting requests by scheduling order and by deadline."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from pypto_serving.sched.request import Request

_Heap = list[tuple[Any, int, str]]
"""Entries of a heap: what it is sorted by, the number of the push, and the request's id."""
_SLACK = 16
"""A heap may hold twice as many entries as there are requests, and this many more."""


class WaitingQueue:
    """Two heaps over waiting requests, owned by the Scheduler: by order and by deadline.

    `push`, `peek` and `remove` cost O(log n) on average, so many waiting requests do not slow a step. The entries of a
    removed request become stale: they hold its id alone, and are dropped at the top of a heap or once they are many.
    """

    def __init__(self) -> None:
        self._heap: _Heap = []
        self._deadlines: _Heap = []
        self._pushes = 0
        self._requests: dict[str, tuple[int, Request]] = {}
        self._aside: set[str] = set()

    def push(self, request: Request) -> None:
        """Add a request. Its deadline counts only if it has never started."""
        self._pushes += 1
        self._requests[request.id] = self._pushes, request
        heapq.heappush(self._heap, (request.order, self._pushes, request.id))
        if request.source.deadline_s is not None and request.life == 0:
            heapq.heappush(self._deadlines, (request.source.deadline_s, self._pushes, request.id))

    def _get(self, push: int, request_id: str) -> Request | None:
        """Return the request of a heap's entry, or None if the entry is stale."""
        number, request = self._requests.get(request_id, (0, None))
        return request if number == push else None

    def peek(self) -> Request | None:
        """Return the first request in order, or None."""
        while self._heap:
            request = self._get(*self._heap[0][1:])
            if request is not None and request.id not in self._aside:
                return request
            heapq.heappop(self._heap)
        return None

    def set_aside(self, request: Request) -> None:
        """Keep a request in the queue, but do not return it from `peek` before `bring_back`."""
        self._aside.add(request.id)

    def bring_back(self, request: Request) -> None:
        """Undo `set_aside`."""
        self._aside.remove(request.id)
        heapq.heappush(self._heap, (request.order, self._requests[request.id][0], request.id))

    def remove(self, request: Request) -> None:
        """Remove a request; do nothing if it is not in the queue."""
        self._requests.pop(request.id, None)
        self._aside.discard(request.id)
        self._drop_stale(self._heap)
        self._drop_stale(self._deadlines)

    def _drop_stale(self, heap: _Heap) -> None:
        """Rebuild a heap if most of its entries are stale."""
        if len(heap) > 2 * len(self._requests) + _SLACK:
            heap[:] = [entry for entry in heap if self._get(*entry[1:])]
            heapq.heapify(heap)

    def take_expired(self, now_s: float) -> Iterator[Request]:
        """Remove and yield requests that have never started and whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = self._get(*heapq.heappop(self._deadlines)[1:])
            if request is not None:
                self.remove(request)
                yield request

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over waiting requests in no particular order."""
        return (request for _, request in self._requests.values())
