"""Preemption: frees blocks for a running request, if need be by preempting another one."""

from __future__ import annotations

from collections.abc import Iterable

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched.registry import RequestRegistry
from pypto_serving.sched.request import Request, by_order
from pypto_serving.sched.step import Counters, Step


class Preemption:
    """A part of the Scheduler, without state of its own."""

    def __init__(self, kv: KVCacheManager, registry: RequestRegistry, counters: Counters) -> None:
        self._kv = kv
        self._registry = registry
        self._counters = counters

    def free_blocks(self, step: Step, request: Request, count: int, anyone: bool) -> bool:
        """Free blocks so that `count` more tokens of `request` may fit. Return False if that is not possible now.

        In this order:

        1. take blocks that were loaded for a waiting request;
        2. wait, if stores in progress will free enough;
        3. preempt another request.
        """
        if self._registry.load_wait.release_one(request):
            return True
        if self._kv.will_fit(request.id, request.num_computed_tokens + count):
            return False
        return self.preempt_for(step, request, anyone)

    def preempt_for(self, step: Step, request: Request, anyone: bool) -> bool:
        """Preempt the last request in order that this step does not serve. Return False if there is none.

        Free all of its blocks and queue it again. It need not compute again what a lower tier has stored. `victim_for`
        says which requests are candidates.
        """
        victim = victim_for(request, self._registry.running.values(), step, anyone)
        if victim is None:
            return False
        self._counters.num_preemptions += 1
        victim.num_preemptions += 1
        step.preempted.add(victim.id)
        self._kv.demote(victim.id, step.now_s)
        self._registry.put_back(victim)
        return True


def victim_for(request: Request, running: Iterable[Request], step: Step, anyone: bool) -> Request | None:
    """Return the request to preempt for `request`, or None.

    Only requests after `request` in order are candidates, so the first in order always makes progress. With `anyone`,
    every other request is a candidate.
    """
    candidates = [
        other
        for other in running
        if other is not request and other.id not in step.requests and (anyone or other.order > request.order)
    ]
    return max(candidates, key=by_order, default=None)
