"""RequestRegistry: owner of all Requests from arrival to last output; lends rows to running ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched import outputs
from pypto_serving.sched.crash_counts import CrashCounts
from pypto_serving.sched.load_wait import LoadWait
from pypto_serving.sched.prefix_wait import PrefixWait
from pypto_serving.sched.queue import Deadlines, TokenShares, WaitingQueue
from pypto_serving.sched.request import Request, Status
from pypto_serving.sched.step import Counters
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestFault, RequestOutput


class RequestRegistry:
    """Owns every Request from `enter` to its last output, and the totals of all steps. A part of the Scheduler.

    A request is in exactly one of these states:

        waiting        the queue: not started, preempted, or put back after a worker died
        prefix_wait    waits for a prefix that a running request computes
        load_wait      waits for blocks from a lower tier (WAITING_FOR_KV), or for its turn to load them
        running        has a row and blocks

    A row is a number that is lent to a running request; `free_rows` are the others.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.uncommitted_tokens = config.uncommitted_tokens
        self.kv = kv
        self.counters = Counters()
        self._num_arrived = 0
        self._deadlines = Deadlines()
        self._num_rows = config.limits.max_num_seqs
        self._dropped_rows: list[int] = []
        self.free_rows = list(range(self._num_rows - 1, -1, -1))
        self.requests: dict[str, Request] = {}
        self.shares = TokenShares() if config.scheduler.fair_scheduling else None
        self.waiting = WaitingQueue(self.shares)
        self.prefix_wait = PrefixWait(self.waiting, kv)
        self.load_wait = LoadWait(self.requests, self.waiting, kv)
        self.running: dict[str, Request] = {}
        self.crash_counts = CrashCounts()

    def enter(self, source: EngineRequest) -> None:
        """Queue a new request."""
        self._num_arrived += 1
        limits = self.config.limits
        request = Request(source, self._num_arrived, limits.max_model_len, limits.traits)
        self.requests[request.id] = request
        if self.shares is not None:
            self.shares.enter(request)
        self._deadlines.add(request)
        self.waiting.push(request)

    def start(self, request: Request, num_cached: int) -> None:
        """Give a waiting request a row. Its blocks hold `num_cached` computed tokens."""
        self._stop_waiting(request)
        request.status = Status.RUNNING
        request.row = self.free_rows.pop()
        request.num_committed = request.num_computed_tokens = num_cached
        self.running[request.id] = request
        self.prefix_wait.add_producer(request)

    def take_dropped_rows(self) -> list[int]:
        """Return the rows that the worker must drop with the next plan."""
        dropped, self._dropped_rows = self._dropped_rows, []
        return dropped

    def put_back(self, request: Request) -> None:
        """Queue a request again, without computed tokens."""
        self._leave(request)
        request.status = Status.WAITING
        self.waiting.push(request)

    def put_all_back(self) -> None:
        """Queue all requests again, without computed tokens, because the worker is gone."""
        for request in [*self.running.values(), *self.load_wait.clear()]:
            self.put_back(request)
        self._dropped_rows.clear()

    def finish(
        self, request: Request, reason: str, fault: RequestFault | None = None, now_s: float = 0.0
    ) -> RequestOutput:
        """End a request: free its row and blocks, and forget it. Every request ends here."""
        self._leave(request)
        self._stop_waiting(request)
        self._deadlines.remove(request)
        self.crash_counts.forget(request.id)
        if self.shares is not None:
            self.shares.leave(request)
        request.status = Status.FINISHED
        self.kv.forget(request.id)
        del self.requests[request.id]
        return outputs.finished(request, reason, fault, now_s)

    def finish_expired(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose deadlines have passed, in any state."""
        return [
            self.finish(request, "error", outputs.deadline_passed(request, now_s), now_s)
            for request in self._deadlines.take_expired(now_s)
        ]

    def _stop_waiting(self, request: Request) -> None:
        """Remove a request that starts or ends from its waiting state."""
        self.waiting.remove(request)
        self.load_wait.forget(request)
        self.prefix_wait.forget(request.id)

    def _leave(self, request: Request) -> None:
        """Free the row and blocks of a running request. Its results in flight will be dropped."""
        if request.status is not Status.RUNNING:
            return
        del self.running[request.id]
        self.free_rows.append(request.row)
        self._dropped_rows.append(request.row)
        request.life += 1
        request.row = -1
        request.num_committed = request.num_computed_tokens = request.num_placeholders = 0
        self.kv.release(request.id)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.prefix_wait) + len(self.load_wait)

    def _all_waiting(self) -> Iterable[Request]:
        return (*self.waiting, *self.prefix_wait, *self.load_wait)

    def check(self) -> None:
        """Assert that each request is in exactly one state, and that rows are consistent."""
        rows = [*self.free_rows, *(request.row for request in self.running.values())]
        assert sorted(rows) == list(range(self._num_rows)), "rows leaked"
        found = Counter([*self.running, *(request.id for request in self._all_waiting())])
        assert found == Counter(self.requests.keys()), "a request is nowhere, or in two places"
        self.crash_counts.check(self.requests.keys())
        self.prefix_wait.check()
        for request in self.running.values():
            assert request.num_committed <= request.num_computed_tokens <= request.num_tokens
            assert len(request.tokens) <= request.max_tokens
        for request in self._all_waiting():
            assert request.num_computed_tokens == 0 and request.row < 0
