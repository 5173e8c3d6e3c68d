"""PrefixWait: requests that wait for a prefix that a running request is computing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched.queue import WaitingQueue
from pypto_serving.sched.request import Request


class _Prefill(NamedTuple):
    """A running request in its life `life`; a producer until it has committed `end` tokens."""

    request: Request
    life: int
    end: int

    @property
    def goes_on(self) -> bool:
        return self.request.life == self.life and self.request.num_committed < self.end


class PrefixWait:
    """Producers of prefixes and the requests that wait for them. A part of the Scheduler, which shares the queue.

    producer    a running request until all blocks of the tokens that it started with are published
    waiter      a waiting request whose next block is the next one that a producer publishes; it is not in the queue

    A waiter waits until its producer has published the whole shared prefix, or has left its row for any reason. A
    producer runs and precedes its waiters in order, so the wait always ends. It does not block later requests in the
    queue. Without this wait, 16 choices of a prompt of 480 tokens computed 7,792 tokens; with it, 848.
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager) -> None:
        self._queue = queue
        self._kv = kv
        self._producers: list[_Prefill] = []
        self._by_next: dict[bytes, _Prefill] = {}
        self._waiters: dict[str, tuple[Request, _Prefill]] = {}

    def add_producer(self, request: Request) -> None:
        """Add a starting request, if it will publish blocks."""
        producer = _Prefill(request, request.life, self._kv.num_nameable(len(request.tokens)))
        if producer.goes_on:
            self._producers.append(producer)
            self._note_next(producer)

    def _note_next(self, producer: _Prefill) -> None:
        key = self._kv.next_key(producer.request.id, producer.request.num_committed)
        if key is not None:
            self._by_next.setdefault(key, producer)

    def wait(self, request: Request, matched: int) -> bool:
        """Move a request out of the queue if a producer is computing its next block after `matched` tokens.

        Return False otherwise, and for requests that hold loaded blocks, which must start with these.
        """
        if not self._producers or self._kv.holds_fill(request.id):
            return False
        key = self._kv.next_key(request.id, matched)
        producer = None if key is None else self._by_next.get(key)
        if producer is None or producer.request.order > request.order:
            return False
        limit = min(producer.end, self._kv.num_nameable(len(request.tokens) - 1))
        end = self._kv.num_shared(producer.request.id, request.id, limit)
        if end <= matched:
            return False
        self._queue.remove(request)
        self._waiters[request.id] = request, producer._replace(end=end)
        return True

    def forget(self, request_id: str) -> None:
        """Remove a waiter that ended."""
        self._waiters.pop(request_id, None)

    def update(self) -> None:
        """Update producers by their committed tokens, and queue the waiters whose wait has ended."""
        if not self._producers and not self._waiters:
            return
        self._producers = [producer for producer in self._producers if producer.goes_on]
        self._by_next.clear()
        for producer in self._producers:
            self._note_next(producer)
        for request in [request for request, prefix in self._waiters.values() if not prefix.goes_on]:
            del self._waiters[request.id]
            self._queue.push(request)

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiters)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the waiters."""
        return (request for request, _ in self._waiters.values())

    def check(self) -> None:
        """Assert that each waiter waits for a request that precedes it in order."""
        for request, prefix in self._waiters.values():
            assert prefix.request.order < request.order, "a request waits for one after it"
