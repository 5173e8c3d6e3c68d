"""A step from its planning to its result, and what is counted over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from pypto_serving.sched.request import Request
from pypto_serving.types.step import NewRow, RowFault, RowLogprobs, StepResult
from pypto_serving.types.tokens import id_list


class Scheduled(msgspec.Struct, frozen=True):
    """`count` tokens of a request's life in one step, and `num_drafts` behind them where they reach its last token.

    `samples` says that they do. Where they start is known when the steps before are committed: at `num_committed`.
    """

    request: Request
    life: int
    count: int
    num_drafts: int
    samples: bool


class RowResult(NamedTuple):
    """What a step made of a row: tokens, perhaps with log-probabilities for each, and why it cannot go on."""

    token_ids: Sequence[int]
    logprobs: Sequence[RowLogprobs]
    fault: RowFault | None


def rows_of(result: StepResult) -> dict[int, RowResult]:
    """Sort a result by row."""
    rows, tokens = id_list(result.rows), id_list(result.token_ids)
    faults = {fault.row: fault for fault in result.faults}
    logprobs: dict[int, list[RowLogprobs]] = {}
    for entry in result.logprobs:
        logprobs.setdefault(entry.row, []).append(entry)
    if not result.counts and not logprobs and not faults:
        return {row: RowResult((token,), (), None) for row, token in zip(rows, tokens, strict=True)}
    counts = id_list(result.counts) if result.counts else (1,) * len(rows)
    left = iter(tokens)
    return {
        row: RowResult(tuple(islice(left, count)), logprobs.get(row, ()), faults.get(row))
        for row, count in zip(rows, counts, strict=True)
    }


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
    has_drafts: bool = False
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
    num_drafts: int = 0
    num_accepted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
