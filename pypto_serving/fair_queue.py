"""Weighted fair queueing: whose work is next, where clients share a process."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

MAX_KEYS = 4096
"""Keys whose virtual time is kept; beyond it, those that are not ahead of the clock are forgotten."""


class FairQueue(Generic[K, T]):
    """Owns items that wait, by key. Start-time fair queueing (Goyal et al., SIGCOMM 1996) with equal weights.

    - The virtual time of a key is the CPU time that its items used.
    - The clock is the virtual time at which the last item began. A key that had nothing to do begins at the clock, so
      that idleness earns no claim.
    - Next is the oldest item of the key whose virtual time will be the least after it; `expected_s` returns the CPU
      time that an item may take, 0 if nothing is known. So a key whose items take a tenth of the time has ten times as
      many turns.
    """

    def __init__(self, expected_s: Callable[[T], float] = lambda item: 0.0) -> None:
        self.clock_s = 0.0
        self._expected_s = expected_s
        self._used_s: dict[K, float] = {}
        self._waiting: dict[K, deque[T]] = {}
        self._heap: list[tuple[float, int, float, K]] = []
        self._arrivals = itertools.count()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __contains__(self, key: K) -> bool:
        """Return whether an item of a key waits."""
        return key in self._waiting

    def push(self, key: K, item: T) -> None:
        """Add an item."""
        waiting = self._waiting.setdefault(key, deque())
        waiting.append(item)
        self._num_waiting += 1
        if len(waiting) == 1:
            self._used_s[key] = max(self.clock_s, self._used_s.get(key, 0.0))
            self._enter(key)

    def pop(self) -> T | None:
        """Take the next item; None if there is none."""
        while self._heap:
            _, _, start_s, key = heapq.heappop(self._heap)
            waiting = self._waiting.get(key)
            if not waiting:
                continue
            if start_s < self._used_s[key]:  # charged meanwhile
                self._enter(key)
                continue
            self.clock_s = max(self.clock_s, start_s)
            item = waiting.popleft()
            self._num_waiting -= 1
            if waiting:
                self._enter(key)
            else:
                del self._waiting[key]
            return item
        return None

    def pop_longest(self) -> T:
        """Take the newest item of the key with the most items."""
        key = max(self._waiting, key=lambda each: len(self._waiting[each]))
        item = self._waiting[key].pop()
        self._discard(key)
        return item

    def remove(self, key: K, item: T) -> bool:
        """Take an item that waits; return whether it did."""
        if item not in self._waiting.get(key, ()):
            return False
        self._waiting[key].remove(item)
        self._discard(key)
        return True

    def charge(self, key: K, used_s: float) -> None:
        """Add the CPU time that an item of a key used."""
        self._used_s[key] = max(self.clock_s, self._used_s.get(key, 0.0)) + used_s
        if len(self._used_s) > MAX_KEYS:
            kept = {each for each, used in self._used_s.items() if used > self.clock_s} | self._waiting.keys()
            self._used_s = {each: self._used_s[each] for each in kept}

    def forget(self, key: K) -> None:
        """Forget a key and its items."""
        self._num_waiting -= len(self._waiting.pop(key, ()))
        self._used_s.pop(key, None)

    def _enter(self, key: K) -> None:
        start_s = self._used_s[key]
        end_s = start_s + self._expected_s(self._waiting[key][0])
        heapq.heappush(self._heap, (end_s, next(self._arrivals), start_s, key))

    def _discard(self, key: K) -> None:
        self._num_waiting -= 1
        if not self._waiting[key]:
            del self._waiting[key]
