"""Scheduler: owner of all Requests; lets computed tokens catch up with known ones, step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import attrgetter

from pypto_serving.errors import ConfigError
from pypto_serving.kv.manager import KVCacheManager, Match
from pypto_serving.sched import budget, outputs
from pypto_serving.sched.queue import WaitingQueue
from pypto_serving.sched.request import Request, Status
from pypto_serving.sched.step import Counters, RowResult, Scheduled, Step, rows_of
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.kv import max_live_blocks, publication_lag
from pypto_serving.types.request import EngineRequest, RequestFault, RequestOutput
from pypto_serving.types.step import NewRow, StepPlan, StepResult
from pypto_serving.types.tier import TIERS, TierInventory, TransferDone, Transfers
from pypto_serving.types.tokens import pack_ids

ALONE_STRIKES = 2
MAX_STRIKES = 3
MAX_LOADING = 32
"""Requests that wait for their KV at once; the others are looked up when it is their turn."""
SPARE_BLOCKS = 0.01
"""Share of each pool that admission leaves free, so that those already running can grow."""

_ORDER = attrgetter("order")
_LEAST_RECENT = attrgetter("last_step", "order")


class Scheduler:
    """Owns every Request from `add` to its last output, the rows lent to them, and the steps in flight.

    `plan()` and `commit()` alternate, up to `config.depth` plans ahead; results come back in order. Time enters
    as an argument. The same calls give the same plans.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.counters = Counters()
        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: dict[str, Request] = {}
        self._loading: dict[str, Request] = {}
        self._loaded: dict[str, Request] = {}
        self._in_flight: deque[Step] = deque()
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._dropped_rows: list[int] = []
        self._num_arrived = 0
        self._num_planned = 0
        self._last_writer = 0
        self._suspects: set[str] = set()
        self._unsettled = config.max_num_batched_tokens * config.depth + publication_lag(config.groups)
        self._require_room(config.num_blocks)

    def worker_ready(
        self, num_blocks: tuple[int, ...], fingerprint: bytes, inventories: Sequence[TierInventory] = ()
    ) -> None:
        """A worker offers empty KV pools and what its stores hold. Raises ConfigError if they are too small."""
        assert not self._running and not self._in_flight and not self._loading
        self._require_room(num_blocks)
        self.kv.open(num_blocks, fingerprint, inventories)

    def _require_room(self, available: tuple[int, ...]) -> None:
        live = max_live_blocks(self.config.groups, self.config.max_model_len, self._unsettled)
        for group, num_blocks, needed in zip(self.config.groups, available, live, strict=True):
            if needed > num_blocks - 1:
                raise ConfigError(outputs.too_few_blocks(group.name, num_blocks - 1, needed, self.config))

    # Requests come and go.

    def add(self, source: EngineRequest) -> RequestOutput | None:
        """Queue a request; returns its last output at once if it can never be served."""
        fault = self._unservable(source)
        if fault is not None:
            return RequestOutput(request_id=source.request_id, finish_reason="error", fault=fault)
        self._num_arrived += 1
        request = Request(source, self._num_arrived, self.config.max_model_len)
        self._requests[request.id] = request
        self._waiting.push(request)
        return None

    def _unservable(self, source: EngineRequest) -> RequestFault | None:
        num_tokens = len(source.token_ids) // 4
        if source.request_id in self._requests:
            return RequestFault(400, "duplicate_request", f"request id {source.request_id} is in use")
        if num_tokens == 0:
            return RequestFault(400, "empty_prompt", "the prompt has no tokens; send at least one")
        if num_tokens >= self.config.max_model_len:
            return RequestFault(400, "context_length_exceeded", outputs.too_long(num_tokens, self.config))
        return outputs.beyond_program(source.params, self.config)

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests at once and give back what they hold; unknown ids are ignored."""
        known = [self._requests[i] for i in request_ids if i in self._requests]
        return [self._finish(request, "abort") for request in known]

    def _finish(
        self, request: Request, reason: str, fault: RequestFault | None = None, now_s: float = 0.0
    ) -> RequestOutput:
        """The one way out of the registry: rows, blocks, queues and the entry itself are given back."""
        self._leave(request)
        self._waiting.remove(request)
        self._loading.pop(request.id, None)
        self._loaded.pop(request.id, None)
        self._suspects.discard(request.id)
        request.status = Status.FINISHED
        self.kv.forget(request.id)
        del self._requests[request.id]
        return outputs.finished(request, reason, fault, now_s)

    def _leave(self, request: Request) -> None:
        """Take a request off its row; what it has in flight belongs to a past life."""
        if request.status is not Status.RUNNING:
            return
        del self._running[request.id]
        self._dropped_rows.append(request.row)
        self._free_rows.append(request.row)
        request.life += 1
        request.row = -1
        request.num_committed = request.num_computed_tokens = request.num_placeholders = 0
        self.kv.release(request.id)

    def _back_to_waiting(self, request: Request) -> None:
        self._leave(request)
        request.status = Status.WAITING
        self._waiting.push(request)

    # Planning.

    def plan(self, now_s: float) -> tuple[StepPlan | None, list[RequestOutput]]:
        """Decide one step: its plan, or None if nothing can run, and last outputs of requests that timed out."""
        self._last_writer = self._in_flight[-1].step_id if self._in_flight else 0
        expired = [
            self._finish(request, "error", outputs.queue_timeout(request, now_s), now_s)
            for request in self._waiting.take_expired(now_s)
        ]
        for request_id in self.kv.expire_fills(now_s):
            self._may_start(request_id)
        self.kv.plan_stores(now_s)
        step = Step(
            self._num_planned + 1,
            now_s,
            self.config.max_num_batched_tokens,
            new_blocks=[[] for _ in self.kv.groups],
        )
        if self._suspects:
            self._schedule_alone(step, now_s)
        else:
            self._schedule_running(step)
            if not step.short_of_blocks:
                self._admit_waiting(step, now_s)
        return (self._dispatch(step) if step.scheduled else None), expired

    def _schedule_running(self, step: Step) -> None:
        """Decodes first, least recently served first; then prompts in order of arrival."""
        decodes, prompts = [], []
        for request in self._running.values():
            missing = self._missing(request)
            if missing == 1:
                decodes.append(request)
            elif missing > 1:
                prompts.append(request)
        decodes.sort(key=_LEAST_RECENT)
        prompts.sort(key=_ORDER)
        head = prompts[0] if prompts else self._waiting.peek() if self._free_rows else None
        decode_budget = step.budget - budget.prompt_share(self.config, step, head)
        for request in decodes[: max(0, decode_budget)]:
            self._schedule(step, request, 1)
        for request in prompts:
            self._schedule(step, request, self._missing(request))

    def _schedule(self, step: Step, request: Request, missing: int, anyone: bool = False) -> None:
        """Add what fits of a running request's `missing` tokens, preempting for its blocks if there is no other way."""
        if request.status is not Status.RUNNING:
            return
        count = budget.chunk(self.config, step, missing)
        if count == 0:
            return
        num_drafts = budget.num_drafts(self.config, step, request) if missing == 1 else 0
        blocks = self.kv.reserve(request.id, request.num_computed_tokens + count + num_drafts)
        if blocks is None and num_drafts:
            num_drafts = 0
            blocks = self.kv.reserve(request.id, request.num_computed_tokens + count)
        while blocks is None:
            if not self._find_blocks(step, request, count, anyone):
                step.short_of_blocks = True
                return
            blocks = self.kv.reserve(request.id, request.num_computed_tokens + count)
        for pairs, added in zip(step.new_blocks, blocks, strict=True):
            for block_id in added:
                pairs += (request.row, block_id)
        self._enter(step, request, count, num_drafts)

    def _missing(self, request: Request) -> int:
        """Tokens that can be computed now. The last token of a request is sampled but never computed."""
        known = len(request.tokens) + request.num_placeholders
        return min(known, request.max_tokens - 1) - request.num_computed_tokens

    def _victim(self, step: Step, request: Request, anyone: bool) -> Request | None:
        """Who gives way to `request`: the last in order of those behind it that this step does not serve.

        A request never preempts itself or one before it, so the first in order always gets on. With `anyone`
        every other request may be taken.
        """
        candidates = [
            other
            for other in self._running.values()
            if other is not request and other.id not in step.requests and (anyone or other.order > request.order)
        ]
        return max(candidates, key=_ORDER, default=None)

    def _preempt(self, step: Step, victim: Request) -> None:
        """Take all blocks of a request. It resumes later, with what a tier holds of it, by computing the rest again."""
        assert victim.id not in step.requests
        self.counters.num_preemptions += 1
        victim.num_preemptions += 1
        step.preempted.add(victim.id)
        self.kv.demote(victim.id, step.now_s)
        self._back_to_waiting(victim)

    def _find_blocks(self, step: Step, request: Request, count: int, anyone: bool) -> bool:
        """Take blocks from somebody for `request`; False if there is nobody, or enough will come free soon."""
        if self._release_loaded(request):
            return True
        if self.kv.will_fit(request.id, request.num_computed_tokens + count):
            return False
        victim = self._victim(step, request, anyone)
        if victim is not None:
            self._preempt(step, victim)
        return victim is not None

    def _release_loaded(self, beneficiary: Request) -> bool:
        """Take the blocks that were loaded for another waiting request; False if there is none."""
        others = [request_id for request_id in self._loaded if request_id != beneficiary.id]
        if others:
            del self._loaded[others[-1]]
            self.kv.release(others[-1])
        return bool(others)

    def _enter(self, step: Step, request: Request, count: int, num_drafts: int = 0) -> None:
        """Put tokens of a running request into the step; until it commits, all drafts count as accepted."""
        request.num_computed_tokens += count
        samples = request.num_computed_tokens == request.num_tokens
        if samples:
            request.num_computed_tokens += num_drafts
            request.num_placeholders += 1 + num_drafts
        request.last_step = step.step_id
        step.budget -= count + num_drafts
        step.has_drafts |= num_drafts > 0
        step.requests.add(request.id)
        step.scheduled.append(Scheduled(request, request.life, count, num_drafts, samples))

    def _admit_waiting(self, step: Step, now_s: float) -> None:
        """Start waiting requests in order until rows, budget or blocks run out."""
        while step.budget > 0 and self._free_rows:
            request = self._waiting.peek()
            if request is None or request.id in step.preempted or not self._admit(step, request, now_s):
                return

    def _admit(self, step: Step, request: Request, now_s: float) -> bool:
        match = self.kv.match(request.id, request.tokens, request.source.cache_salt)
        spare = SPARE_BLOCKS if self._running else 0.0
        while not self.kv.fits(request.id, match, request.num_tokens, self._unsettled, spare):
            if self._running or self._loading or not self._release_loaded(request):
                return False
        may_wait = not self._suspects and len(self._loading) < MAX_LOADING
        if may_wait and self.kv.fetch(request.id, request.num_tokens, match):
            self._wait_for_kv(request)
            return True
        count = budget.chunk(self.config, step, request.num_tokens - match.num_tokens)
        if count == 0 or self.kv.reserve(request.id, match.num_tokens + count, match) is None:
            return False
        self._start(step, request, match, now_s)
        self._enter(step, request, count)
        return True

    def _wait_for_kv(self, request: Request) -> None:
        """Others run while blocks of a waiting request are loaded."""
        self._waiting.remove(request)
        request.status = Status.WAITING_FOR_KV
        self._loading[request.id] = request

    def transferred(self, done: Iterable[TransferDone], now_s: float) -> None:
        """Transfers ended: requests that waited for them may start."""
        for transfer in done:
            for request_id in self.kv.transferred(transfer, now_s):
                self._may_start(request_id)

    def _may_start(self, request_id: str) -> None:
        """A request need not wait for its KV any longer."""
        request = self._loading.pop(request_id, None)
        if request is not None:
            request.status = Status.WAITING
            self._waiting.push(request)
            if self.kv.holds_fill(request_id):
                self._loaded[request_id] = request

    def take_transfers(self, now_s: float) -> Transfers | None:
        """What is to be moved between tiers now. Steps planned before may still write to blocks given up since."""
        jobs = self.kv.take_jobs(now_s)
        return Transfers(0, self._last_writer, jobs) if jobs else None

    def _start(self, step: Step, request: Request, match: Match, now_s: float) -> None:
        """Give a waiting request a row and take over what the cache holds of it."""
        self._waiting.remove(request)
        self._loaded.pop(request.id, None)
        request.status = Status.RUNNING
        request.row = self._free_rows.pop()
        request.num_committed = request.num_computed_tokens = match.num_tokens
        self._running[request.id] = request
        if request.num_cached_tokens < 0:
            sources = self.kv.sources(request.id, match)
            self.kv.record_hits(sources)
            request.num_cached_tokens = match.num_tokens
            request.cached_by_tier = tuple(sources[tier] for tier in TIERS)
            request.scheduled_s = now_s
            self.counters.prefix_queries += request.prompt_len
            self.counters.prefix_hits += match.num_tokens
            self.counters.prompt_tokens += request.prompt_len
        step.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.tokens.tobytes(),
                prompt_len=request.prompt_len,
                num_computed=match.num_tokens,
                blocks=tuple(pack_ids(ids) for ids in self.kv.table(request.id)),
                sampling=request.row_sampling(),
            )
        )

    def _schedule_alone(self, step: Step, now_s: float) -> None:
        """While requests are suspected of crashing the worker, run one of them with nobody beside it."""
        suspect = min((self._requests[i] for i in self._suspects), key=_ORDER)
        self.counters.num_solo_steps += 1
        if suspect.status is Status.RUNNING:
            self._schedule(step, suspect, self._missing(suspect), anyone=True)
            return
        while not self._admit(step, suspect, now_s):
            victim = self._victim(step, suspect, anyone=True)
            if victim is None:
                return
            self._preempt(step, victim)

    def _dispatch(self, step: Step) -> StepPlan:
        self._num_planned = step.step_id
        self._in_flight.append(step)
        self._count(step)
        plan = StepPlan(
            step_id=step.step_id,
            epoch=0,
            rows=pack_ids([entry.request.row for entry in step.scheduled]),
            num_tokens=pack_ids([entry.count for entry in step.scheduled]),
            new_rows=step.new_rows,
            new_blocks=tuple(pack_ids(pairs) for pairs in step.new_blocks),
            drops=pack_ids(self._dropped_rows),
            num_drafts=pack_ids([entry.num_drafts for entry in step.scheduled]) if step.has_drafts else b"",
        )
        self._dropped_rows.clear()
        return plan

    def _count(self, step: Step) -> None:
        counters = self.counters
        counters.num_steps += 1
        counters.step_rows = len(step.scheduled)
        counters.step_tokens = self.config.max_num_batched_tokens - step.budget
        counters.max_step_rows = max(counters.max_step_rows, counters.step_rows)

    # Results.

    def commit(self, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Take in the result of the oldest step in flight; returns what it added to each request.

        Raises RuntimeError when the result is of another step. Rows of requests that left meanwhile are ignored.
        """
        step = self._in_flight.popleft()
        if result.step_id != step.step_id:
            raise RuntimeError(f"result of step {result.step_id} where step {step.step_id} was due")
        rows = rows_of(result)
        self._measure(step, result)
        added = []
        for entry in step.scheduled:
            request = entry.request
            if request.life != entry.life or request.status is not Status.RUNNING:
                continue
            if entry.samples:
                added.append(self._take(entry, rows[request.row], now_s))
            else:
                self._advance(request, entry.count)
        return added

    def _take(self, entry: Scheduled, row: RowResult, now_s: float) -> RequestOutput:
        """Add the tokens that a row sampled, up to the one that ends its request. Drafts behind them were rejected."""
        request, reason = entry.request, None
        request.num_placeholders -= 1 + entry.num_drafts
        if row.token_ids and not request.first_token_s:
            request.first_token_s = now_s
        count = 0
        while reason is None and count < len(row.token_ids):
            request.tokens.append(row.token_ids[count])
            reason = outputs.stop_reason(request, row.token_ids[count])
            count += 1
        self.counters.generation_tokens += count
        self.counters.num_drafts += entry.num_drafts
        self.counters.num_accepted += max(0, count - 1)
        output = outputs.tokens_added(request, row, count)
        if reason is None and row.fault is not None:
            fault = RequestFault(500, row.fault.code, row.fault.message)
            return outputs.merged(output, self._finish(request, "error", fault, now_s))
        accepted = len(row.token_ids) - 1
        request.num_computed_tokens -= entry.num_drafts - accepted
        self._advance(request, entry.count + accepted)
        return output if reason is None else outputs.merged(output, self._finish(request, reason, now_s=now_s))

    def _measure(self, step: Step, result: StepResult) -> None:
        """How fast prompts are computed, from steps that are mostly prompt."""
        num_tokens = sum(entry.count for entry in step.scheduled)
        if num_tokens > 2 * len(step.scheduled):
            self.kv.record_prefill(num_tokens, result.elapsed_s)

    def _advance(self, request: Request, count: int) -> None:
        """Confirm that `count` more tokens are computed."""
        request.num_committed += count
        self.kv.commit(request.id, request.tokens, request.num_committed, request.prompt_len)
        if request.strikes and request.num_committed >= request.suspect_end:
            request.strikes = 0
            self._suspects.discard(request.id)

    def worker_lost(self, now_s: float) -> list[RequestOutput]:
        """The device and all steps in flight are gone: everybody waits again with nothing computed.

        Requests of the step that crashed get a strike; at the third they fail. Returns their last outputs.
        """
        crashed = self._in_flight[0].scheduled if self._in_flight else []
        struck = [
            (entry, entry.request.num_committed)
            for entry in crashed
            if entry.life == entry.request.life and entry.request.row >= 0
        ]
        self._in_flight.clear()
        for request in [*self._running.values(), *self._loading.values()]:
            self._back_to_waiting(request)
        self._loading.clear()
        self._loaded.clear()
        self._dropped_rows.clear()
        return [output for entry, start in struck if (output := self._strike(entry, start, now_s)) is not None]

    def _strike(self, entry: Scheduled, start: int, now_s: float) -> RequestOutput | None:
        """Hold a crash against a request, whose tokens from `start` on were in the step."""
        request = entry.request
        request.strike(start, start + entry.count + entry.num_drafts)
        if request.strikes >= MAX_STRIKES:
            return self._finish(request, "error", outputs.crashes_worker(request), now_s)
        if request.strikes >= ALONE_STRIKES:
            self._suspects.add(request.id)
        else:
            self._suspects.discard(request.id)
        return None

    def fail_all(self, fault: RequestFault, now_s: float) -> list[RequestOutput]:
        """Give every request up."""
        return [self._finish(request, "error", fault, now_s) for request in list(self._requests.values())]

    # Views.

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Steps planned and not committed."""
        return len(self._in_flight)

    def check(self) -> None:
        """Assert that rows, queues, registry and KV agree."""
        rows = [request.row for request in self._running.values()]
        assert sorted(rows + self._free_rows) == list(range(self.config.max_num_seqs)), "rows leaked"
        queued = len(self._running) + len(self._waiting) + len(self._loading)
        assert len(self._requests) == queued, "a request is in no queue"
        assert len(self.kv) <= len(self._requests), "the KV manager remembers finished requests"
        assert self._suspects <= self._requests.keys()
        for request in self._running.values():
            assert request.num_committed <= request.num_computed_tokens <= request.num_tokens
            assert len(request.tokens) <= request.max_tokens
        for request in self._waiting:
            assert request.num_computed_tokens == 0 and request.row < 0
        self.kv.check()
