"""PrefixWait: which running requests compute prefixes that waiting ones want, and who waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pypto_serving.kv.manager import KVCacheManager, Match
from pypto_serving.sched.queue import WaitingQueue
from pypto_serving.sched.request import Request


class _Prefill(NamedTuple):
    """Life `life` of a running request, until it has committed `end` tokens."""

    request: Request
    life: int
    end: int

    @property
    def goes_on(self) -> bool:
        return self.request.life == self.life and self.request.num_committed < self.end


class PrefixWait:
    """Leaders and their followers. A part of the Scheduler, with which it shares the queue.

    leader      a running request until all blocks of the tokens that it started with are published
    follower    a waiting request whose next block is the next one that a leader publishes; it is not in the queue

    Without it, 16 choices of a prompt of 480 tokens computed 7,792 tokens, since none had published a block when the
    others were matched; now 848. A follower waits until its leader has published the whole prefix that they share, or
    has left its row for whatever reason. A leader runs and stands before its followers in order, so the wait always
    ends. Requests behind a follower go on.
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager) -> None:
        self._queue = queue
        self._kv = kv
        self._leaders: list[_Prefill] = []
        self._by_next: dict[bytes, _Prefill] = {}
        self._followers: dict[str, tuple[Request, _Prefill]] = {}

    def lead(self, request: Request) -> None:
        """Add a request that starts, if it will publish blocks."""
        leader = _Prefill(request, request.life, self._kv.num_nameable(len(request.tokens)))
        if leader.goes_on:
            self._leaders.append(leader)
            self._note_next(leader)

    def _note_next(self, leader: _Prefill) -> None:
        key = self._kv.next_key(leader.request.id, leader.request.num_committed)
        if key is not None:
            self._by_next.setdefault(key, leader)

    def follow(self, request: Request, match: Match) -> bool:
        """Move a request out of the queue if a leader computes its next block. Return False if it must not follow.

        A request that holds loaded blocks has to start with them.
        """
        if not self._leaders or self._kv.holds_fill(request.id):
            return False
        key = self._kv.next_key(request.id, match.num_tokens)
        leader = None if key is None else self._by_next.get(key)
        if leader is None or leader.request.order > request.order:
            return False
        limit = min(leader.end, self._kv.num_nameable(len(request.tokens) - 1))
        end = self._kv.num_shared(leader.request.id, request.id, limit)
        if end <= match.num_tokens:
            return False
        self._queue.remove(request)
        self._followers[request.id] = request, leader._replace(end=end)
        return True

    def forget(self, request_id: str) -> None:
        """Remove a follower that ended."""
        self._followers.pop(request_id, None)

    def update(self) -> None:
        """Take in what was committed since the last step. Queue the followers that wait no longer."""
        if not self._leaders and not self._followers:
            return
        self._leaders = [leader for leader in self._leaders if leader.goes_on]
        self._by_next.clear()
        for leader in self._leaders:
            self._note_next(leader)
        for request in [request for request, prefix in self._followers.values() if not prefix.goes_on]:
            del self._followers[request.id]
            self._queue.push(request)

    def __len__(self) -> int:
        """Return how many requests follow."""
        return len(self._followers)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the followers."""
        return (request for request, _ in self._followers.values())

    def check(self) -> None:
        """Assert that each follower waits for a request before it."""
        for request, prefix in self._followers.values():
            assert prefix.request.order < request.order, "a request waits for one after it"
