"""Scheduler: decide which tokens each step computes, and process the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched import admission, budget, outputs, preemption, results
from pypto_serving.sched.admission import require_blocks, unservable
from pypto_serving.sched.crash_counts import MAX_CRASHES
from pypto_serving.sched.registry import RequestRegistry
from pypto_serving.sched.request import Request, Status, by_order
from pypto_serving.sched.step import Step, step_plan
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestFault, RequestOutput
from pypto_serving.types.step import StepPlan, StepResult
from pypto_serving.types.tier import Tier, TierInventory, TransferDone, Transfers
from pypto_serving.util import ceil_div

_least_recent = attrgetter("last_step", "order")


class Scheduler:
    """Owns the steps in flight and, in its RequestRegistry, all requests and the rows lent to them.

    `admission` starts waiting requests, `preemption` frees blocks for running ones, `results` applies results of steps.

    The caller begins each turn with `begin_turn()`, then calls `plan()` while fewer than `config.depth` steps are in
    flight, and commits results in the order of plans. Time is an argument, so equal calls give equal plans.
    """

    def __init__(self, config: EngineConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self._registry = RequestRegistry(config, kv)
        self.counters = self._registry.counters
        self._in_flight: deque[Step] = deque()
        self._num_planned = 0
        self._last_writer = 0
        self._scored_tokens = config.limits.max_prompt_logprobs
        self._drafted_tokens = config.limits.max_step_drafts
        self._lacks_blocks = False
        require_blocks(config, config.cache.num_blocks)

    # Requests come and go.

    def add(self, source: EngineRequest) -> RequestOutput | None:
        """Queue a request. If it can never be served, return its last output instead."""
        fault = unservable(source, self.config)
        if source.request_id in self._registry.requests:
            fault = RequestFault(400, "duplicate_request", f"request id {source.request_id} is in use")
        if fault is not None:
            return RequestOutput(request_id=source.request_id, finish_reason="error", fault=fault)
        self._registry.enter(source)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests at once and free their rows and blocks. Ignore unknown ids."""
        requests = self._registry.requests
        known = [requests[request_id] for request_id in request_ids if request_id in requests]
        return [self._registry.finish(request, "abort") for request in known]

    def fail_all(self, fault: RequestFault, now_s: float) -> list[RequestOutput]:
        """End every request with `fault`. Return their last outputs."""
        requests = list(self._registry.requests.values())
        return [self._registry.finish(request, "error", fault, now_s) for request in requests]

    def expire(self, now_s: float) -> list[RequestOutput]:
        """End the requests whose deadlines have passed. Return their last outputs."""
        return self._registry.finish_expired(now_s)

    # Planning.

    def begin_turn(self, now_s: float) -> list[RequestOutput]:
        """Prepare for planning steps. Return the last outputs of requests whose deadlines have passed.

        Queue requests whose wait has ended, and plan demotions.
        """
        expired = self.expire(now_s)
        self._registry.load_wait.update(now_s)
        self._registry.prefix_wait.update()
        self.kv.tiers.demotions.plan(now_s)
        return expired

    def plan(self, now_s: float) -> StepPlan | None:
        """Decide one step. Return its plan, or None if nothing can run."""
        self._last_writer = self._in_flight[-1].step_id if self._in_flight else 0
        limits = self.config.limits
        step = Step(
            self._num_planned + 1, now_s, limits.max_num_batched_tokens, len(self.kv.groups), self._scored_tokens
        )
        if self._registry.crash_counts.suspects:
            self._schedule_alone(step, now_s)
        else:
            self._schedule_all(step, now_s)
        self._lacks_blocks = not (step.scheduled or step.admits)
        return self._dispatch(step) if step.scheduled else None

    def _schedule_all(self, step: Step, now_s: float) -> None:
        """Schedule decodes, then prompts, then more decodes with the rest of the budget.

        A share of the budget is reserved for prompts. Drafts get the rest after every decode has its own token.
        """
        running = self._registry.running
        decodes, prompts = decodes_and_prompts(running.values())
        share = ceil_div(len(running), self.config.limits.traits.stages)  # so that no stage of a pipeline idles
        head = self._registry.waiting.peek() if self._registry.free_rows else None
        if prompts and (head is None or prompts[0].order < head.order):
            head = prompts[0]
        decode_budget = step.budget - budget.prompt_share(self.config, step, head)
        if self.config.num_drafts:
            limit = min(self._drafted_tokens, decode_budget - len(decodes))
            budget.allow_drafts(step, limit, len(decodes), prompt_waits=head is not None)
        left = iter(decodes)
        share -= self._schedule_decodes(step, left, min(share, decode_budget))
        self._schedule_prompts(step, prompts, now_s)
        self._schedule_decodes(step, left, min(share, step.budget))

    def _schedule_decodes(self, step: Step, decodes: Iterator[Request], limit: int) -> int:
        """Schedule up to `limit` decodes and return their number. Decodes that find no blocks do not count."""
        before = len(step.scheduled)
        for request in decodes if limit > 0 else ():
            self._schedule(step, request, 1)
            if len(step.scheduled) >= before + limit:
                break
        return len(step.scheduled) - before

    def _schedule_prompts(self, step: Step, prompts: list[Request], now_s: float) -> None:
        """Schedule running and waiting prompts in order. Reserve the blocks that running prompts still need."""
        registry = self._registry
        for request in prompts:
            admission.reserve_growth(registry, step, request)
        for request in prompts:
            admission.admit_all(registry, step, now_s, before=request)
            admission.reserve_growth(registry, step, request, -1)
            self._schedule(step, request, request.num_uncomputed_tokens)
            admission.reserve_growth(registry, step, request)
        admission.admit_all(registry, step, now_s)

    def _schedule(self, step: Step, request: Request, missing: int, anyone: bool = False) -> None:
        """Schedule as many of a running request's `missing` tokens as fit; preempt others if nothing else frees blocks.

        Drafts never cause a preemption: if there are no blocks for drafts, schedule the request without them.
        """
        if request.status is not Status.RUNNING:
            return
        count = budget.chunk(self.config, step, request, missing)
        if count == 0:
            return
        num_drafts = budget.num_drafts(self.config, step, request) if missing == 1 and step.draft_budget else 0
        blocks = self.kv.reserve(request.id, request.num_computed_tokens + count + num_drafts)
        if blocks is None and num_drafts:
            num_drafts = 0
            blocks = self.kv.reserve(request.id, request.num_computed_tokens + count)
        while blocks is None:
            if not preemption.free_blocks(self._registry, step, request, count, anyone):
                step.admits = False
                return
            blocks = self.kv.reserve(request.id, request.num_computed_tokens + count)
        if blocks:
            step.add_blocks(request.row, blocks)
        step.schedule(request, count, num_drafts)

    def _schedule_alone(self, step: Step, now_s: float) -> None:
        """Schedule one suspect, with no other request in the step."""
        registry = self._registry
        suspect = min((registry.requests[i] for i in registry.crash_counts.suspects), key=by_order)
        if suspect.status is Status.RUNNING:
            self._schedule(step, suspect, suspect.num_uncomputed_tokens, anyone=True)
            return
        while not admission.admit(registry, step, suspect, now_s):
            if not preemption.preempt_for(registry, step, suspect, anyone=True):
                step.admits = False
                return

    def _dispatch(self, step: Step) -> StepPlan:
        """Put a step in flight and return its message to the worker."""
        self._num_planned = step.step_id
        self._in_flight.append(step)
        self.counters.record_step(len(step.scheduled), self.config.limits.max_num_batched_tokens - step.budget)
        if self._registry.shares is not None:
            self._registry.shares.charge(step.scheduled)
        return step_plan(step, self._registry.take_dropped_rows())

    def commit(self, result: StepResult, now_s: float) -> list[RequestOutput]:
        """Apply the result of the oldest step in flight. Return the new tokens of each request.

        Ignores rows that requests have left since the step was planned. Raises RuntimeError for another step's result.
        """
        step = self._in_flight.popleft()
        if result.step_id != step.step_id:
            raise RuntimeError(f"result of step {result.step_id} where step {step.step_id} was due")
        return results.take_result(self._registry, step, result, now_s)

    # Transfers between tiers.

    def take_transfers(self, now_s: float) -> Transfers | None:
        """Return the transfers to start now, or None.

        Steps in flight may still write to blocks freed since they were planned, so loads start after these steps.
        """
        jobs = self.kv.tiers.transfers.take_jobs(now_s)
        return Transfers(0, self._last_writer, jobs) if jobs else None

    def transferred(self, done: Iterable[TransferDone], now_s: float) -> None:
        """Record transfers that ended and queue the requests that waited for them."""
        self._registry.load_wait.transferred(done, now_s)

    def hanging_tiers(self, now_s: float) -> tuple[Tier, ...]:
        """Return the tiers whose hanging transfers hold blocks without which nothing can run.

        Only the end of the worker frees these blocks.
        """
        if not self._lacks_blocks or self._in_flight or self._registry.load_wait.is_busy:
            return ()
        return self.kv.tiers.hanging(now_s)

    # Lives of the worker.

    def worker_ready(
        self, num_blocks: tuple[int, ...], fingerprint: bytes, inventories: Sequence[TierInventory], now_s: float
    ) -> list[RequestOutput]:
        """Begin to use a new worker, with empty KV pools and the contents of its stores.

        Return the last outputs of requests that fail because another model began to answer them.
        Raises ConfigError if a pool is too small for one request.
        """
        assert not self._registry.running and not self._in_flight and not self._registry.load_wait
        require_blocks(self.config, num_blocks)
        same = fingerprint == self.kv.fingerprint
        self.kv.open(num_blocks, fingerprint, inventories)
        begun = [] if same else [request for request in self._registry.requests.values() if request.has_begun]
        return [self._registry.finish(request, "error", outputs.model_changed(), now_s) for request in begun]

    def worker_lost(self, now_s: float) -> list[RequestOutput]:
        """Queue all requests again without computed tokens, since device and steps in flight are lost.

        Increase the crash counts of requests whose steps were being computed. Return the last outputs of failed ones.
        """
        registry = self._registry
        ends: dict[str, int] = {}
        for step in islice(self._in_flight, self.config.limits.traits.stages):
            for entry in step.scheduled:
                request = entry.request
                if entry.life == request.life and request.row >= 0:
                    end = ends.get(request.id, request.num_committed)
                    ends[request.id] = end + entry.count + entry.num_drafts
        requests = [(registry.requests[request_id], end) for request_id, end in ends.items()]
        counts = [registry.crash_counts.add(request.id, request.num_committed, end) for request, end in requests]
        self._in_flight.clear()
        registry.put_all_back()
        return [
            registry.finish(request, "error", outputs.crashes_worker(count), now_s)
            for (request, _), count in zip(requests, counts, strict=True)
            if count >= MAX_CRASHES
        ]

    # Views.

    def log_ids_in_flight(self) -> dict[str, str]:
        """Return the log ids of all requests in steps in flight, by request id."""
        requests = [entry.request for step in self._in_flight for entry in step.scheduled]
        return {request.id: request.source.log_id for request in requests}

    @property
    def num_running(self) -> int:
        return len(self._registry.running)

    @property
    def num_waiting(self) -> int:
        return self._registry.num_waiting

    @property
    def num_deferred(self) -> int:
        """Number of waiting requests that are not in the queue."""
        return len(self._registry.prefix_wait) + len(self._registry.load_wait)

    @property
    def num_loading(self) -> tuple[int, int, int]:
        """See `LoadWait.counts`."""
        return self._registry.load_wait.counts

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._registry.requests)

    @property
    def num_in_flight(self) -> int:
        """Number of steps planned and not committed."""
        return len(self._in_flight)

    def check(self) -> None:
        """Assert that requests and KV agree."""
        self._registry.check()
        assert len(self.kv) <= len(self._registry.requests), "the KV manager remembers finished requests"
        self.kv.check()


def decodes_and_prompts(running: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Split running requests by their number of missing tokens.

    Decodes lack one token; least recently scheduled first.
    Prompts lack more; in order of priority and arrival.
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
