"""A step from its planning to its result, and what is counted over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pypto_serving.sched.request import Request
from pypto_serving.types.step import NewRow


class Scheduled(msgspec.Struct, frozen=True):
    """Tokens [start, start + count) of a request's life, in one step; `samples` when they reach its last token."""

    request: Request
    life: int
    start: int
    count: int
    samples: bool


@dataclass(slots=True)
class Step:
    """A plan in the making, then in flight."""

    step_id: int
    now_s: float
    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)
    requests: set[str] = field(default_factory=set)
    preempted: set[str] = field(default_factory=set)
    short_of_blocks: bool = False
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """Totals since the start; `max_step_rows` is the largest batch seen."""

    num_steps: int = 0
    step_tokens: int = 0
    step_rows: int = 0
    max_step_rows: int = 0
    num_preemptions: int = 0
    num_solo_steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
