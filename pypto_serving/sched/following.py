"""Following: which running requests compute prefixes that waiting ones want, and who waits for them."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from pypto_serving.kv.manager import KVCacheManager, Match
from pypto_serving.sched.request import Request

MAX_FOLLOWERS = 256
"""Most requests that wait for others' prefixes at once. Further ones stay in the queue and are matched later."""


class _Prefill(NamedTuple):
    """Life `life` of a running request, until it has committed `end` tokens."""

    request: Request
    life: int
    end: int

    @property
    def goes_on(self) -> bool:
        return self.request.life == self.life and self.request.num_committed < self.end


class Following:
    """Leaders and their followers. Owned and changed by the Scheduler.

    leader      a running request until all blocks of the tokens that it started with are published
    follower    a waiting request whose next block is the next one that a leader publishes

    A follower waits until its leader has published the whole prefix that they share, or has left its row for whatever
    reason. A leader runs and stands before its followers in order, so waiting for it delays nobody and always ends.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._leaders: list[_Prefill] = []
        self._by_next: dict[bytes, _Prefill] = {}
        self._followers: dict[str, tuple[Request, _Prefill]] = {}

    @property
    def is_full(self) -> bool:
        """Whether no further request may follow."""
        return len(self._followers) >= MAX_FOLLOWERS

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
        """Let a waiting request follow the leader that computes its next block. Return False if it must not.

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
        self._followers[request.id] = request, leader._replace(end=end)
        return True

    def forget(self, request_id: str) -> None:
        """Remove a follower that ended."""
        self._followers.pop(request_id, None)

    def update(self) -> list[Request]:
        """Take in what was committed since the last step. Remove and return the followers that wait no longer."""
        if not self._leaders and not self._followers:
            return []
        self._leaders = [leader for leader in self._leaders if leader.goes_on]
        self._by_next.clear()
        for leader in self._leaders:
            self._note_next(leader)
        ready = [request for request, prefix in self._followers.values() if not prefix.goes_on]
        for request in ready:
            del self._followers[request.id]
        return ready

    def check(self, waiting: Set[str]) -> None:
        """Assert that followers are among the requests that wait, and that each waits for one before it."""
        assert self._followers.keys() <= waiting, "a follower does not wait"
        for request, prefix in self._followers.values():
            assert prefix.request.order < request.order, "a request waits for one after it"
