"""Scheduler: decide which tokens each step computes. It owns all Requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence

from pypto_serving.kv.fetch import Fetch
from pypto_serving.kv.manager import KVCacheManager, Match
from pypto_serving.sched import budget, outputs
from pypto_serving.sched.fairness import TokenShares
from pypto_serving.sched.following import Following
from pypto_serving.sched.loading import Loading
from pypto_serving.sched.order import by_order, decodes_and_prompts, victim_for
from pypto_serving.sched.queue import Deadlines, WaitingQueue
from pypto_serving.sched.request import Request, Status
from pypto_serving.sched.rows import Rows
from pypto_serving.sched.step import Counters, RowResult, Scheduled, Step, new_row, plain_tokens, rows_of, step_plan
from pypto_serving.sched.strikes import MAX_STRIKES, Strikes
from pypto_serving.sched.validation import require_blocks, unservable
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestFault, RequestOutput
from pypto_serving.types.step import NOT_FINITE, StepPlan, StepResult
from pypto_serving.types.tier import TIERS, TierInventory, TransferDone, Transfers

SPARE_BLOCKS = 0.01
"""Share of each pool that admission leaves free, so that running requests can grow."""
MAX_SET_ASIDE = 64
"""Most waiting requests that a step sets aside, to follow others or to load later: it hashes the prompt of each."""


class Scheduler:
    """Owns every Request from `add` to its last output, the rows lent to requests, and the steps in flight.

    The caller alternates `plan()` and `commit()`, with up to `config.depth` plans in flight, and commits results in
    the order of their plans. Time is an argument. The same calls give the same plans.

    A request is in one of these places:

        _waiting    the queue: not started, preempted, or put back after a worker died
        _following  waits for a prefix that a running request computes
        _loading    waits for blocks from a lower tier (WAITING_FOR_KV), or for its turn to load them
        _running    has a row and blocks
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.counters = Counters()
        self._requests: dict[str, Request] = {}
        self._shares = TokenShares() if config.fair_scheduling else None
        self._waiting = WaitingQueue(self._shares)
        self._deadlines = Deadlines()
        self._running: dict[str, Request] = {}
        self._loading = Loading(self._waiting, kv)
        self._following = Following(self._waiting, kv)
        self._in_flight: deque[Step] = deque()
        self._rows = Rows(config.max_num_seqs)
        self._num_arrived = 0
        self._num_planned = 0
        self._last_writer = 0
        self._strikes = Strikes()
        self._unsettled = config.unsettled_tokens
        require_blocks(config, config.num_blocks)

    def worker_ready(
        self, num_blocks: tuple[int, ...], fingerprint: bytes, inventories: Sequence[TierInventory] = ()
    ) -> None:
        """Take over a new worker: its empty KV pools and the contents of its stores.

        Raises ConfigError if a pool is too small for one request.
        """
        assert not self._running and not self._in_flight and not self._loading
        require_blocks(self.config, num_blocks)
        self.kv.open(num_blocks, fingerprint, inventories)

    # Requests come and go.

    def add(self, source: EngineRequest) -> RequestOutput | None:
        """Queue a request. If it can never be served, return its last output instead."""
        fault = unservable(source, self.config)
        if source.request_id in self._requests:
            fault = RequestFault(400, "duplicate_request", f"request id {source.request_id} is in use")
        if fault is not None:
            return RequestOutput(request_id=source.request_id, finish_reason="error", fault=fault)
        self._num_arrived += 1
        request = Request(source, self._num_arrived, self.config.max_model_len)
        self._requests[request.id] = request
        if self._shares is not None:
            self._shares.enter(request)
        self._deadlines.add(request)
        self._waiting.push(request)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests at once and free their rows and blocks. Ignore unknown ids."""
        known = [self._requests[i] for i in request_ids if i in self._requests]
        return [self._finish(request, "abort") for request in known]

    def _finish(
        self, request: Request, reason: str, fault: RequestFault | None = None, now_s: float = 0.0
    ) -> RequestOutput:
        """End a request: free its row and blocks and remove it from every queue. Requests end nowhere else."""
        self._leave(request)
        self._stop_waiting(request)
        self._strikes.forget(request.id)
        if self._shares is not None:
            self._shares.leave(request)
        request.status = Status.FINISHED
        self.kv.forget(request.id)
        del self._requests[request.id]
        return outputs.finished(request, reason, fault, now_s)

    def _stop_waiting(self, request: Request) -> None:
        """Remove a request that starts or ends from wherever it waits."""
        self._deadlines.remove(request)
        self._waiting.remove(request)
        self._loading.forget(request)
        self._following.forget(request.id)

    def _leave(self, request: Request) -> None:
        """Free the row and blocks of a running request. Its results still in flight will be dropped."""
        if request.status is not Status.RUNNING:
            return
        del self._running[request.id]
        self._rows.give_back(request.row)
        request.life += 1
        request.row = -1
        request.num_committed = request.num_computed_tokens = request.num_placeholders = 0
        self.kv.release(request.id)

    def _back_to_waiting(self, request: Request) -> None:
        """Queue a request again, with nothing computed."""
        self._leave(request)
        request.status = Status.WAITING
        self._waiting.push(request)

    # Planning.

    def plan(self, now_s: float) -> tuple[StepPlan | None, list[RequestOutput]]:
        """Decide one step. Return its plan, or None if nothing can run, and the last outputs of timed-out requests."""
        self._last_writer = self._in_flight[-1].step_id if self._in_flight else 0
        expired = [
            self._finish(request, "error", outputs.queue_timeout(request, now_s), now_s)
            for request in self._deadlines.take_expired(now_s)
        ]
        self._loading.update(now_s)
        self._following.update()
        self.kv.plan_stores(now_s)
        step = Step(self._num_planned + 1, now_s, self.config.max_num_batched_tokens, len(self.kv.groups))
        if self._strikes.suspects:
            self._schedule_alone(step, now_s)
        else:
            self._schedule_all(step, now_s)
        return (self._dispatch(step) if step.scheduled else None), expired

    def _schedule_all(self, step: Step, now_s: float) -> None:
        """Schedule decodes first, less the share of the budget that is kept for prompts; then prompts.

        Decodes get again what prompts leave of the budget, and drafts what is left when every decode has its own token.
        """
        decodes, prompts = decodes_and_prompts(self._running.values())
        head = self._waiting.peek() if self._rows else None
        if prompts and (head is None or prompts[0].order < head.order):
            head = prompts[0]
        decode_budget = step.budget - budget.prompt_share(self.config, step, head)
        step.draft_budget = max(0, decode_budget - len(decodes)) if self.config.num_drafts else 0
        left = iter(decodes)
        self._schedule_decodes(step, left, decode_budget)
        self._schedule_prompts(step, prompts, now_s)
        self._schedule_decodes(step, left, step.budget)

    def _schedule_decodes(self, step: Step, decodes: Iterator[Request], most: int) -> None:
        """Take and schedule up to `most` decodes. One that finds no blocks does not count: the next is tried."""
        end = len(step.scheduled) + most
        for request in decodes if most > 0 else ():
            self._schedule(step, request, 1)
            if len(step.scheduled) >= end:
                return

    def _schedule_prompts(self, step: Step, prompts: list[Request], now_s: float) -> None:
        """Schedule running and waiting prompts in order. A running one before which others start keeps its blocks."""
        for request in prompts:
            self._promise(step, request)
        for request in prompts:
            self._admit_waiting(step, now_s, before=request)
            self._promise(step, request, -1)
            self._schedule(step, request, request.num_uncomputed_tokens)
            self._promise(step, request)
        self._admit_waiting(step, now_s)

    def _promise(self, step: Step, request: Request, sign: int = 1) -> None:
        """Keep the blocks that a running prompt still needs from requests that start; or, with -1, do so no longer."""
        if request.status is Status.RUNNING and request.num_uncomputed_tokens > 1:
            step.promise(self.kv.growth(request.num_computed_tokens, request.num_tokens), sign)

    def _schedule(self, step: Step, request: Request, missing: int, anyone: bool = False) -> None:
        """Add as many of a running request's `missing` tokens as fit; preempt others if nothing else frees blocks.

        Drafts never cause a preemption: without blocks for them, the request is scheduled without drafts.
        """
        if request.status is not Status.RUNNING:
            return
        count = budget.chunk(self.config, step, missing)
        if count == 0:
            return
        num_drafts = budget.num_drafts(self.config, step, request) if missing == 1 and step.draft_budget else 0
        blocks = self.kv.reserve(request.id, request.num_computed_tokens + count + num_drafts)
        if blocks is None and num_drafts:
            num_drafts = 0
            blocks = self.kv.reserve(request.id, request.num_computed_tokens + count)
        while blocks is None:
            if not self._find_blocks(step, request, count, anyone):
                step.admits = False
                return
            blocks = self.kv.reserve(request.id, request.num_computed_tokens + count)
        if any(blocks):
            step.add_blocks(request.row, blocks)
        self._enter(step, request, count, num_drafts)

    def _preempt(self, step: Step, victim: Request) -> None:
        """Free all blocks of a request and queue it again. Blocks that a lower tier has stored need no recompute."""
        assert victim.id not in step.requests
        self.counters.num_preemptions += 1
        victim.num_preemptions += 1
        step.preempted.add(victim.id)
        self.kv.demote(victim.id, step.now_s)
        self._back_to_waiting(victim)

    def _find_blocks(self, step: Step, request: Request, count: int, anyone: bool) -> bool:
        """Free blocks for `request`.

        Return False if no other request can give any, or if stores in progress will free enough.
        """
        if self._loading.release_one(request):
            return True
        if self.kv.will_fit(request.id, request.num_computed_tokens + count):
            return False
        victim = victim_for(request, self._running.values(), step, anyone)
        if victim is not None:
            self._preempt(step, victim)
        return victim is not None

    def _enter(self, step: Step, request: Request, count: int, num_drafts: int = 0) -> None:
        """Add tokens of a running request to the step. Until the step commits, every draft counts as accepted."""
        request.num_computed_tokens += count
        samples = request.num_computed_tokens == request.num_tokens
        if samples:
            request.num_computed_tokens += num_drafts
            request.num_placeholders += 1 + num_drafts
        request.last_step = step.step_id
        step.add(Scheduled(request, request.life, count, num_drafts, samples))

    def _admit_waiting(self, step: Step, now_s: float, before: Request | None = None) -> None:
        """Start waiting requests in order, all or those `before` a running one, until one must stay in the queue."""
        while step.admits and step.budget > 0 and self._rows and step.num_set_aside < MAX_SET_ASIDE:
            request = self._waiting.peek()
            if request is None or (before is not None and request.order > before.order):
                return
            step.admits = request.id not in step.preempted and self._admit(step, request, now_s)

    def _admit(self, step: Step, request: Request, now_s: float) -> bool:
        """Start a waiting request, or let it wait elsewhere. Return False if it must stay first in the queue."""
        match = self.kv.match(request.id, request.tokens, request.source.cache_salt)
        may_wait = not self._strikes.suspects
        if may_wait and self._following.follow(request, match):
            step.num_set_aside += 1
            return True
        spare = SPARE_BLOCKS if self._running else 0.0
        while not self.kv.fits(request.id, match, request.num_tokens, self._unsettled, spare, step.promised):
            if self._running or self._loading.is_busy or not self._loading.release_one(request):
                return False
        if may_wait:
            fetch = self.kv.fetch(request.id, request.tokens, match, may_begin=not self._loading.is_full)
            if fetch is Fetch.BEGUN:
                self._loading.wait(request, now_s)
                return True
            if fetch is Fetch.LATER and self._loading.put_off(request, now_s):
                step.num_set_aside += 1
                return True
        count = budget.chunk(self.config, step, request.num_tokens - match.num_tokens)
        if count == 0 or self.kv.reserve(request.id, match.num_tokens + count, match) is None:
            return False
        self._start(step, request, match, now_s)
        self._enter(step, request, count)
        self._promise(step, request)
        return True

    def transferred(self, done: Iterable[TransferDone], now_s: float) -> None:
        """Record transfers that ended and queue the requests that waited for them."""
        self._loading.transferred(done, now_s)

    def take_transfers(self, now_s: float) -> Transfers | None:
        """Return the transfers to start now, or None.

        Steps planned before may still write to blocks freed since, so loads start behind the last of those steps.
        """
        jobs = self.kv.take_jobs(now_s)
        return Transfers(0, self._last_writer, jobs) if jobs else None

    def _start(self, step: Step, request: Request, match: Match, now_s: float) -> None:
        """Give a waiting request a row; the cached tokens count as computed."""
        self._stop_waiting(request)
        request.status = Status.RUNNING
        request.row = self._rows.take()
        request.num_committed = request.num_computed_tokens = match.num_tokens
        self._running[request.id] = request
        self._following.lead(request)
        if request.num_cached_tokens < 0:
            self._record_first_start(request, match, now_s)
        step.new_rows.append(new_row(request, self.kv.table(request.id)))

    def _record_first_start(self, request: Request, match: Match, now_s: float) -> None:
        """Record the cache hits of a request, by tier, and the time of its first step."""
        sources = self.kv.sources(request.id, match)
        self.kv.record_hits(sources)
        request.num_cached_tokens = match.num_tokens
        request.cached_by_tier = tuple(sources[tier] for tier in TIERS)
        request.scheduled_s = now_s
        self.counters.record_prompt(request.prompt_len, match.num_tokens)

    def _schedule_alone(self, step: Step, now_s: float) -> None:
        """Schedule one suspect, with no other request in the step."""
        suspect = min((self._requests[i] for i in self._strikes.suspects), key=by_order)
        if suspect.status is Status.RUNNING:
            self._schedule(step, suspect, suspect.num_uncomputed_tokens, anyone=True)
            return
        while not self._admit(step, suspect, now_s):
            victim = victim_for(suspect, self._running.values(), step, anyone=True)
            if victim is None:
                return
            self._preempt(step, victim)

    def _dispatch(self, step: Step) -> StepPlan:
        """Put a step in flight and return its message to the worker."""
        self._num_planned = step.step_id
        self._in_flight.append(step)
        self.counters.record_step(len(step.scheduled), self.config.max_num_batched_tokens - step.budget)
        if self._shares is not None:
            self._shares.charge(step.scheduled)
        return step_plan(step, self._rows.take_dropped())

    # Results.

    def commit(self, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Apply the result of the oldest step in flight. Return the new tokens of each request.

        Ignores rows of requests that left since the step was planned. Raises RuntimeError for any other step's result.
        """
        step = self._in_flight.popleft()
        if result.step_id != step.step_id:
            raise RuntimeError(f"result of step {result.step_id} where step {step.step_id} was due")
        plain = None if step.has_drafts else plain_tokens(result)
        rows = rows_of(result) if plain is None else {}
        self._measure(step, result)
        added = []
        for entry in step.scheduled:
            request = entry.request
            if request.life != entry.life or request.status is not Status.RUNNING:
                continue
            if not entry.samples:
                self._advance(request, entry.count)
            elif plain is not None:
                added.append(self._append(request, entry.count, plain[request.row], now_s))
            elif (output := self._take(entry, rows[request.row], now_s)) is not None:
                added.append(output)
        return added

    def _append(self, request: Request, count: int, token_id: int, now_s: float) -> RequestOutput:
        """Do what `_take` does for a row of one token and nothing else, at less cost: most rows are such."""
        request.num_placeholders -= 1
        request.tokens.append(token_id)
        self.counters.generation_tokens += 1
        reason = outputs.stop_reason(request, token_id)
        output = outputs.token_added(request, token_id)
        if not request.first_token_s:
            request.first_token_s = now_s
            output = outputs.started(request, output)
        self._advance(request, count)
        return output if reason is None else outputs.merged(output, self._finish(request, reason, now_s=now_s))

    def _take(self, entry: Scheduled, row: RowResult, now_s: float) -> RequestOutput | None:
        """Append the tokens of a row, up to the one that ends its request. Take back rejected drafts.

        Forced tokens behind what was sampled are not computed yet. A row that got none computes its last token again.
        """
        request, reason = entry.request, None
        request.num_placeholders -= 1 + entry.num_drafts
        count = 0
        while reason is None and count < len(row.token_ids):
            request.tokens.append(row.token_ids[count])
            reason = outputs.stop_reason(request, row.token_ids[count])
            count += 1
        self.counters.record_output(count, entry.num_drafts)
        output = outputs.tokens_added(request, row, count)
        if row.token_ids and not request.first_token_s:
            request.first_token_s = now_s
            output = outputs.started(request, output)
        if reason is None and row.fault is not None:
            if row.fault.code == NOT_FINITE:
                self.kv.discard(request.id)
            fault = RequestFault(row.fault.status, row.fault.code, row.fault.message)
            return outputs.merged(output, self._finish(request, "error", fault, now_s))
        accepted = min(len(row.token_ids) - 1, entry.num_drafts)
        request.num_computed_tokens -= entry.num_drafts - accepted
        self._advance(request, entry.count + accepted)
        if reason is None:
            return output if count else None
        return outputs.merged(output, self._finish(request, reason, now_s=now_s))

    def _measure(self, step: Step, result: StepResult) -> None:
        """Record the measured prefill speed. Steps of mostly decodes do not count."""
        num_tokens = sum(entry.count for entry in step.scheduled)
        if num_tokens > 2 * len(step.scheduled):
            self.kv.record_prefill(num_tokens, result.elapsed_s)

    def _advance(self, request: Request, count: int) -> None:
        """Confirm that `count` more tokens are computed."""
        request.num_committed += count
        self.kv.commit(request.id, request.tokens, request.num_committed, request.prompt_len)
        if self._strikes:
            self._strikes.clear_committed(request.id, request.num_committed)

    # Worker deaths.

    def worker_lost(self, now_s: float) -> list[RequestOutput]:
        """Queue all requests again with nothing computed, since device and steps in flight are gone.

        Requests of the crashed step get a strike. Return the last outputs of those that fail at their third.
        """
        crashed = self._in_flight[0].scheduled if self._in_flight else []
        struck = [
            (entry, entry.request.num_committed)
            for entry in crashed
            if entry.life == entry.request.life and entry.request.row >= 0
        ]
        self._in_flight.clear()
        for request in [*self._running.values(), *self._loading.clear()]:
            self._back_to_waiting(request)
        self._rows.take_dropped()
        return [output for entry, start in struck if (output := self._strike(entry, start, now_s)) is not None]

    def _strike(self, entry: Scheduled, start: int, now_s: float) -> RequestOutput | None:
        """Give a request a strike for its tokens of a crashed step, from `start` on. Fail it at the third."""
        request = entry.request
        num_strikes = self._strikes.add(request.id, start, start + entry.count + entry.num_drafts)
        if num_strikes < MAX_STRIKES:
            return None
        return self._finish(request, "error", outputs.crashes_worker(num_strikes), now_s)

    def fail_all(self, fault: RequestFault, now_s: float) -> list[RequestOutput]:
        """End every request with `fault`. Return their last outputs."""
        return [self._finish(request, "error", fault, now_s) for request in list(self._requests.values())]

    # Views.

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._loading) + len(self._following)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned and not committed."""
        return len(self._in_flight)

    def check(self) -> None:
        """Assert that rows, queues, registry and KV agree."""
        self._rows.check(request.row for request in self._running.values())
        waiting = [*self._waiting, *self._loading, *self._following]
        places = Counter([*self._running, *(request.id for request in waiting)])
        assert places == Counter(self._requests.keys()), "a request is nowhere, or in two places"
        assert len(self.kv) <= len(self._requests), "the KV manager remembers finished requests"
        self._strikes.check(self._requests.keys())
        self._following.check()
        for request in self._running.values():
            assert request.num_committed <= request.num_computed_tokens <= request.num_tokens
            assert len(request.tokens) <= request.max_tokens
        for request in waiting:
            assert request.num_computed_tokens == 0 and request.row < 0
        self.kv.check()
