"""WaitingQueue: waiting requests by scheduling order and by deadline."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from pypto_serving.sched.request import Request, Status


class WaitingQueue:
    """Two heaps over waiting requests, owned by the Scheduler: by order and by deadline.

    `push`, `peek` and `remove` cost O(log n), so many waiting requests do not slow a step. Removed requests stay in the
    heaps and are skipped when they reach the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], int, Request]] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._pushes = 0
        self._entries: dict[str, int] = {}

    def push(self, request: Request) -> None:
        """Add a request. Its deadline counts only if it has never started."""
        self._pushes += 1
        self._entries[request.id] = self._pushes
        heapq.heappush(self._heap, (request.order, self._pushes, request))
        if request.source.deadline_s is not None and request.life == 0:
            heapq.heappush(self._deadlines, (request.source.deadline_s, self._pushes, request))

    def peek(self) -> Request | None:
        """Return the first request in order, or None."""
        while self._heap and self._entries.get(self._heap[0][2].id) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        """Remove a request; do nothing if it is not in the queue."""
        self._entries.pop(request.id, None)
        if not self._entries:
            self._heap.clear()
            self._deadlines.clear()

    def take_expired(self, now_s: float) -> Iterator[Request]:
        """Remove and yield requests that have never started and whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            request = heapq.heappop(self._deadlines)[2]
            if request.id in self._entries and request.status is Status.WAITING and request.life == 0:
                self.remove(request)
                yield request

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over waiting requests in order. Costs O(n log n)."""
        live = [entry for entry in self._heap if self._entries.get(entry[2].id) == entry[1]]
        return iter([entry[2] for entry in sorted(live, key=lambda entry: entry[:2])])
