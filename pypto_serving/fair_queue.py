"""Weighted fair queueing of the work of clients that share a process."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MAX_KEYS = 4096
"""Above this many keys, forget the virtual times of keys that are not ahead of the clock."""


class FairQueue(Generic[K, T]):
    """Owns items that wait, by key. Weighted fair queueing (Demers et al., SIGCOMM 1989) with equal weights.

    - The virtual time of a key is the CPU time of its items, charged when each is done. It is the start tag of the
      key's next item; the finish tag adds the expected time of this item, `expected_s`.
    - The clock is the start tag of the last item that began (Goyal et al., SIGCOMM 1996). A key that was idle starts at
      the clock, so that idleness gives no advantage.
    - The oldest item of the key with the smallest finish tag is next.

    So a key that uses less than its share, with items known to be short, waits only for the item in service.
    """

    def __init__(self, expected_s: Callable[[T], float] = lambda item: 0.0) -> None:
        self._expected_s = expected_s
        self._clock_s = 0.0
        self._used_s: dict[K, float] = {}
        self._waiting: dict[K, deque[T]] = {}
        self._heap: list[tuple[float, int, float, K]] = []
        self._arrivals = itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, key: K, item: T) -> None:
        """Add an item."""
        waiting = self._waiting.setdefault(key, deque())
        waiting.append(item)
        self._num_waiting += 1
        if len(waiting) == 1:
            self._used_s[key] = max(self._clock_s, self._used_s.get(key, 0.0))
            self._enter(key)

    def pop(self) -> T | None:
        """Take the next item; None if there is none."""
        while self._heap:
            _, _, start_s, key = heapq.heappop(self._heap)
            waiting = self._waiting.get(key)
            if not waiting:
                continue
            if start_s < self._used_s[key]:  # the key was charged meanwhile
                self._enter(key)
                continue
            self._clock_s = max(self._clock_s, start_s)
            item = waiting.popleft()
            if waiting:
                self._enter(key)
            self._discard(key)
            return item
        return None

    def pop_longest(self) -> T:
        """Take the newest item of the key with the most items."""
        key = max(self._waiting, key=lambda each: len(self._waiting[each]))
        item = self._waiting[key].pop()
        self._discard(key)
        return item

    def remove(self, key: K, item: T) -> bool:
        """Remove a waiting item; return whether it was waiting."""
        if item not in self._waiting.get(key, ()):
            return False
        self._waiting[key].remove(item)
        self._discard(key)
        return True

    def charge(self, key: K, used_s: float) -> None:
        """Add the CPU time that an item of a key used."""
        self._used_s[key] = max(self._clock_s, self._used_s.get(key, 0.0)) + used_s
        if len(self._used_s) > MAX_KEYS:
            kept = {each for each, used in self._used_s.items() if used > self._clock_s} | self._waiting.keys()
            self._used_s = {each: self._used_s[each] for each in kept}

    def _enter(self, key: K) -> None:
        start_s = self._used_s[key]
        finish_s = start_s + self._expected_s(self._waiting[key][0])
        heapq.heappush(self._heap, (finish_s, next(self._arrivals), start_s, key))

    def _discard(self, key: K) -> None:
        """Count a removed item; forget a key without items."""
        self._num_waiting -= 1
        if not self._waiting[key]:
            del self._waiting[key]
