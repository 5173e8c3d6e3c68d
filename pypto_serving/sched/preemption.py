"""Decide which running requests a step serves first, and which one is preempted."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from pypto_serving.sched.request import Request
from pypto_serving.sched.step import Step

by_order = attrgetter("order")
_least_recent = attrgetter("last_step", "order")


def decodes_and_prompts(running: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Sort running requests by what they compute next.

    Decodes: one token is missing; the least recently served come first.
    Prompts: more are missing; in order of priority and arrival.
    """
    decodes, prompts = [], []
    for request in running:
        missing = request.num_uncomputed_tokens
        if missing == 1:
            decodes.append(request)
        elif missing > 1:
            prompts.append(request)
    decodes.sort(key=_least_recent)
    prompts.sort(key=by_order)
    return decodes, prompts


def victim_for(request: Request, running: Iterable[Request], step: Step, anyone: bool) -> Request | None:
    """Return the request to preempt for `request`, or None: the last in order that this step does not serve.

    Only requests behind `request` are candidates, so the first in order always makes progress. With `anyone`, every
    other request is a candidate.
    """
    candidates = [
        other
        for other in running
        if other is not request and other.id not in step.requests and (anyone or other.order > request.order)
    ]
    return max(candidates, key=by_order, default=None)
