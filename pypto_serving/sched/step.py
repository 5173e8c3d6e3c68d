"""Step: one step from its plan to its result; the messages made from it; totals over all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

from pypto_serving.sched.request import Request
from pypto_serving.types.arrays import id_list, pack_list
from pypto_serving.types.step import NewRow, RowFault, RowLogprobs, StepPlan, StepResult
from pypto_serving.util import Rate


class Scheduled(msgspec.Struct, frozen=True):
    """The tokens of one request in a step: `count` tokens, then `num_drafts` draft tokens.

    `samples`: the tokens include the request's last one, so the step samples the next. The first position is known once
    all earlier steps are committed: `num_committed` at that time.
    """

    request: Request
    life: int
    count: int
    num_drafts: int
    samples: bool


class RowResult(NamedTuple):
    """The result of one row.

    Its tokens, their log-probabilities if asked for, a fault that ends the row; numbers of verified and of accepted
    drafts.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[RowLogprobs]
    fault: RowFault | None
    num_drafts: int
    num_accepted: int


def plain_tokens(result: StepResult) -> dict[int, int] | None:
    """Return the token of each row if every row has exactly one token and nothing else, else None."""
    if result.counts or result.logprobs or result.faults:
        return None
    return dict(zip(id_list(result.rows), id_list(result.token_ids), strict=True))


def rows_of(result: StepResult) -> dict[int, RowResult]:
    """Split a result by row."""
    rows, tokens = id_list(result.rows), id_list(result.token_ids)
    faults = {fault.row: fault for fault in result.faults}
    logprobs: dict[int, list[RowLogprobs]] = {}
    for entry in result.logprobs:
        logprobs.setdefault(entry.row, []).append(entry)
    counts = id_list(result.counts) if result.counts else (1,) * len(rows)
    drafts = id_list(result.num_drafts) if result.num_drafts else (0,) * len(rows)
    accepted = id_list(result.num_accepted) if result.num_accepted else (0,) * len(rows)
    left = iter(tokens)
    return {
        row: RowResult(tuple(islice(left, count)), logprobs.get(row, ()), faults.get(row), verified, right)
        for row, count, verified, right in zip(rows, counts, drafts, accepted, strict=True)
    }


class Step:
    """A step that is being planned, then in flight. Owned by the Scheduler.

    - `budget`: the number of tokens left to schedule.
    - `draft_budget`: the part of it for drafts; `draft_share`: the limit of drafts per request.
    - `scored_budget`: how many prompt tokens may still be scored.
    - `new_blocks`: one list per KV group: row, block id, row, ...
    - `admits`: further requests may start; false once a running or waiting request finds no blocks.
    - `num_set_aside`: waiting requests that could not start, and over which later ones were considered.
    - `reserved`: the blocks of each group that running prompts will need after this step.
    """

    def __init__(self, step_id: int, now_s: float, budget: int, num_groups: int, scored_budget: int = 0) -> None:
        self.step_id = step_id
        self.now_s = now_s
        self.budget = budget
        self.draft_budget = 0
        self.draft_share = 0
        self.scored_budget = scored_budget
        self.scheduled: list[Scheduled] = []
        self.requests: set[str] = set()
        self.preempted: set[str] = set()
        self.admits = True
        self.num_set_aside = 0
        self.has_drafts = False
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[list[int]] = [[] for _ in range(num_groups)]
        self.reserved = [0] * num_groups

    def schedule(self, request: Request, count: int, num_drafts: int = 0) -> None:
        """Take tokens of a running request from the budget. Until the step commits, every draft counts as accepted."""
        request.num_computed_tokens += count
        samples = request.num_computed_tokens == request.num_tokens < request.max_tokens
        if samples:
            request.num_computed_tokens += num_drafts
            request.num_placeholders += 1 + num_drafts
        request.last_step = self.step_id
        self.budget -= count + num_drafts
        self.draft_budget -= num_drafts
        self.has_drafts |= num_drafts > 0
        self.requests.add(request.id)
        self.scheduled.append(Scheduled(request, request.life, count, num_drafts, samples))

    def reserve(self, blocks: Sequence[int], sign: int) -> None:
        """Add `sign` times `blocks` to the blocks of each group that running prompts will need."""
        self.reserved = [before + sign * more for before, more in zip(self.reserved, blocks, strict=True)]

    def add_blocks(self, row: int, blocks: Sequence[Sequence[int]]) -> None:
        """Add a row's new blocks, one sequence of ids per KV group."""
        for pairs, added in zip(self.new_blocks, blocks, strict=True):
            for block_id in added:
                pairs += (row, block_id)


def new_row(request: Request, block_table: Sequence[Sequence[int]]) -> NewRow:
    """Return the message that gives a started request's row its tokens, blocks and sampling parameters."""
    return NewRow(
        row=request.row,
        token_ids=request.tokens.tobytes(),
        prompt_len=request.prompt_len,
        num_computed=request.num_computed_tokens,
        blocks=tuple(pack_list(ids) for ids in block_table),
        sampling=request.row_sampling(),
        log_id=request.source.log_id,
    )


def step_plan(step: Step, dropped_rows: Sequence[int]) -> StepPlan:
    """Return the worker's message for a step. The executor fills in the epoch."""
    return StepPlan(
        step_id=step.step_id,
        epoch=0,
        rows=pack_list([entry.request.row for entry in step.scheduled]),
        num_tokens=pack_list([entry.count for entry in step.scheduled]),
        new_rows=step.new_rows,
        new_blocks=tuple([pack_list(pairs) for pairs in step.new_blocks]),
        drops=pack_list(dropped_rows),
        num_drafts=pack_list([entry.num_drafts for entry in step.scheduled]) if step.has_drafts else b"",
    )


@dataclass(slots=True)
class Counters:
    """Totals since the start; rows and tokens of the last step; `max_step_rows`, the largest batch so far.

    `decode_rate`: output tokens per second of steps of mostly decodes. `num_draft_rounds`: how often a row had drafts
    to verify; `accepted_at[i]`: how often its first i + 1 drafts were accepted.
    """

    num_steps: int = 0
    step_tokens: int = 0
    step_rows: int = 0
    max_step_rows: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_draft_rounds: int = 0
    num_drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)
    prefix_queries: int = 0
    prefix_hits: int = 0
    computing_s: float = 0.0
    packing_s: float = 0.0
    sampling_s: float = 0.0
    decode_rate: Rate = field(default_factory=Rate)

    def record_times(self, result: StepResult) -> None:
        """Add the times of a step's parts in the worker."""
        self.packing_s += result.packing_s
        self.sampling_s += result.sampling_s
        self.computing_s += max(0.0, result.elapsed_s - result.packing_s - result.sampling_s)

    def record_step(self, num_rows: int, num_tokens: int) -> None:
        """Count a step of `num_rows` rows and `num_tokens` tokens."""
        self.num_steps += 1
        self.step_rows = num_rows
        self.step_tokens = num_tokens
        self.max_step_rows = max(self.max_step_rows, num_rows)

    def record_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt of `num_tokens` tokens that starts with `num_cached` of them cached."""
        self.prompt_tokens += num_tokens
        self.prefix_queries += num_tokens
        self.prefix_hits += num_cached

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted."""
        return sum(self.accepted_at)

    def record_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts that a row verified and accepted, including accepted ones after its last token."""
        self.num_draft_rounds += 1
        self.num_drafts += num_drafts
        self.accepted_at += [0] * (num_drafts - len(self.accepted_at))
        for i in range(num_accepted):
            self.accepted_at[i] += 1
