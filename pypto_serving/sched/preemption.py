"""Preemption: free blocks for a running request, if necessary by preempting another one."""

from __future__ import annotations

from pypto_serving.sched.registry import RequestRegistry
from pypto_serving.sched.request import Request, by_order
from pypto_serving.sched.step import Step


def free_blocks(registry: RequestRegistry, step: Step, request: Request, count: int, anyone: bool) -> bool:
    """Free blocks so that `count` more tokens of `request` may fit. Return False if that is not possible now.

    In order of preference:

    1. take blocks that were loaded for a waiting request;
    2. wait, if stores in progress will free enough;
    3. preempt another request.
    """
    if registry.load_wait.release_one(request):
        return True
    if registry.kv.will_fit(request.id, request.num_computed_tokens + count):
        return False
    return preempt_for(registry, step, request, anyone)


def preempt_for(registry: RequestRegistry, step: Step, request: Request, anyone: bool) -> bool:
    """Preempt the last request in order that is not in this step. Return False if there is none.

    Only requests after `request` in order are candidates, so the first in order always makes progress. With `anyone`,
    every other request is a candidate. Free all blocks of the victim and queue it again. It can load blocks that a
    lower tier has stored, instead of recomputing them.
    """
    candidates = [
        other
        for other in registry.running.values()
        if other is not request and other.id not in step.requests and (anyone or other.order > request.order)
    ]
    if not candidates:
        return False
    victim = max(candidates, key=by_order)
    registry.counters.num_preemptions += 1
    victim.num_preemptions += 1
    step.preempted.add(victim.id)
    registry.kv.demote(victim.id, step.now_s)
    registry.put_back(victim)
    return True
