"""EngineCore: accept requests, send plans to the worker, return outputs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pypto_serving.engine.worker_process import Executor, GaveUp, WorkerDown, WorkerEvent
from pypto_serving.errors import ConfigError
from pypto_serving.ipc import Channel
from pypto_serving.kv.events import EventLog
from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.logs import of_request
from pypto_serving.processes import ChildProgress
from pypto_serving.sched.scheduler import Scheduler
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import (
    AbortRequests,
    AddRequests,
    ClearCache,
    CoreFailed,
    CoreOutputs,
    CoreProgress,
    CoreReady,
    RequestFault,
    RequestOutput,
    ShutdownCore,
    StepStats,
    ToCore,
)
from pypto_serving.types.step import WorkerHello
from pypto_serving.types.tier import TransferReport
from pypto_serving.util import Clock

log = logging.getLogger(__name__)

SHUTTING_DOWN = RequestFault(503, "unavailable", "the server is shutting down")
if TYPE_CHECKING:
    from pypto_serving.engine.kv_events import KVEventPublisher


class EngineCore:
    """Owns the scheduler and the KV manager. Works over any channel and executor, one `turn()` at a time."""

    def __init__(
        self,
        config: EngineConfig,
        api: Channel[ToCore],
        executor: Executor,
        clock: Clock,
        publisher: KVEventPublisher | None = None,
    ) -> None:
        self.config = config
        events = None if publisher is None else EventLog()
        self._kv = KVCacheManager(
            config.cache.groups,
            config.cache.num_blocks,
            prefix_caching=config.cache.enable_prefix_caching,
            tiers=config.cache.tiers,
            store_policy=config.cache.kv_store,
            longest_blocks=config.longest_blocks,
            transfer_timeout_s=config.faults.transfer_timeout_s,
            events=events,
        )
        self.scheduler = Scheduler(config, self._kv)
        self._publisher = publisher
        self.stopping = False
        self._api = api
        self._executor = executor
        self._clock = clock
        self._ready = False
        self._epoch = 0
        self._num_respawns = 0
        self._last_step_s = clock()
        self._outputs: list[RequestOutput] = []
        self._step_tokens: list[int] = []
        self._reported_s = 0.0
        self._work_since_s = 0.0
        self._worked_s = 0.0
        self._checked = True

    def turn(self) -> None:
        """Handle all messages, plan steps up to `limits.depth` in flight, and report."""
        now_s = self._clock()
        while (message := self._api.receive()) is not None:
            self._handle_message(message)
        for event in self._executor.poll(now_s):
            self._handle_event(event, now_s)
        if self._ready:
            self._plan_ahead(now_s)
        else:
            self._outputs += self.scheduler.expire(now_s)
        if self._publisher is not None and (kv_events := self._kv.take_events()):
            self._publisher.publish(kv_events, now_s)
        self._report(now_s)
        self._worked_s += self._clock() - now_s

    def _handle_message(self, message: ToCore) -> None:
        self._checked = False
        if isinstance(message, AddRequests):
            refused = [self.scheduler.add(request) for request in message.unpack()]
            self._outputs += [output for output in refused if output is not None]
        elif isinstance(message, AbortRequests):
            self._outputs += self.scheduler.abort(message.request_ids)
        elif isinstance(message, ClearCache):
            self._kv.clear(message.tiers)
        elif isinstance(message, ShutdownCore):
            self._outputs += self.scheduler.fail_all(SHUTTING_DOWN, self._clock())
            self.stopping = True

    def _handle_event(self, event: WorkerEvent, now_s: float) -> None:
        if isinstance(event, ChildProgress):
            self._api.send(CoreProgress(event.phase, event.done, event.total))
            return
        self._checked = False
        if isinstance(event, WorkerHello):
            self._worker_ready(event, now_s)
        elif isinstance(event, WorkerDown):
            self._ready = False
            self._num_respawns += 1
            log_ids = self.scheduler.log_ids_in_flight()
            given_up = self.scheduler.worker_lost(now_s)
            for output in given_up:
                if output.fault is not None:
                    log.error("%s", output.fault.message, extra=of_request(log_ids[output.request_id]))
            if given_up:
                self._executor.forgive_deaths()
            self._outputs += given_up
            self._send_outputs(now_s)
        elif isinstance(event, GaveUp):
            self._give_up(event, now_s)
        elif isinstance(event, TransferReport):
            self.scheduler.transferred(event.transfers, now_s)
        else:
            self._last_step_s = now_s
            self._outputs += self.scheduler.commit(event, now_s)

    def _worker_ready(self, hello: WorkerHello, now_s: float) -> None:
        try:
            if hello.groups != self.config.cache.groups or hello.limits != self.config.limits:
                raise ConfigError("the worker's KV groups or limits are not those of the configuration")
            self._outputs += self.scheduler.worker_ready(hello.num_blocks, hello.fingerprint, hello.tiers, now_s)
        except ConfigError as error:
            self._give_up(GaveUp(str(error), error.exit_code), now_s)
            return
        self._ready = True
        self._epoch = hello.epoch
        self._last_step_s = now_s
        self._send_outputs(now_s)
        endpoints = (self._publisher.endpoint, self._publisher.replay_endpoint) if self._publisher else None
        self._api.send(CoreReady(hello.epoch, hello.pid, hello.num_blocks, hello.load_s, endpoints))

    def _give_up(self, event: GaveUp, now_s: float) -> None:
        """Fail every request and stop the core, with the event's reason: the fault concerns the whole replica."""
        self._ready = False
        self._outputs += self.scheduler.worker_lost(now_s)
        self._outputs += self.scheduler.fail_all(RequestFault(503, "engine_dead", event.reason), now_s)
        self._send_outputs(now_s)
        self._api.send(CoreFailed(event.reason, event.exit_code))
        self.stopping = True

    def _plan_ahead(self, now_s: float) -> None:
        self._outputs += self.scheduler.begin_turn(now_s)
        while (
            self.scheduler.num_in_flight < self.config.limits.depth and (plan := self.scheduler.plan(now_s)) is not None
        ):
            self._checked = False
            self._step_tokens.append(self.scheduler.counters.step_tokens)
            self._executor.send_plan(plan)
        if transfers := self.scheduler.take_transfers(now_s):
            self._checked = False
            self._executor.send_transfers(transfers)
        if hanging := self.scheduler.hanging_tiers(now_s):
            self._executor.replace_worker(hanging)

    def _report(self, now_s: float) -> None:
        """Send outputs at once, and statistics at least every heartbeat. Check for leaks once no work is left."""
        if not self.scheduler.has_work:
            self._work_since_s = 0.0
        elif not self._work_since_s:
            self._work_since_s = now_s
        due = now_s - self._reported_s >= self.config.faults.heartbeat_s
        if not (self._outputs or due):
            return
        if due and not self._checked and not self.scheduler.has_work:
            self.check()
            self._checked = True
        self._send_outputs(now_s)

    def _send_outputs(self, now_s: float) -> None:
        self._reported_s = now_s
        self._api.send(CoreOutputs(self._outputs, self.stats()))
        self._outputs, self._step_tokens = [], []

    def stats(self) -> StepStats:
        """Return one snapshot."""
        counters = self.scheduler.counters
        return StepStats(
            ready=self._ready,
            epoch=self._epoch,
            last_step_s=self._last_step_s,
            work_since_s=self._work_since_s,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_deferred=self.scheduler.num_deferred,
            loading=self.scheduler.num_loading,
            num_steps=counters.num_steps,
            step_tokens=tuple(self._step_tokens),
            step_rows=counters.step_rows,
            max_step_rows=counters.max_step_rows,
            num_preemptions=counters.num_preemptions,
            num_respawns=self._num_respawns,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            num_draft_rounds=counters.num_draft_rounds,
            num_drafts=counters.num_drafts,
            accepted_at=tuple(counters.accepted_at),
            prefill_per_s=self._kv.tiers.promotions.prefill_rate.measured_per_second,
            decode_per_s=counters.decode_rate.measured_per_second,
            core_s=self._worked_s,
            packing_s=counters.packing_s,
            computing_s=counters.computing_s,
            sampling_s=counters.sampling_s,
            kv_usage=self._kv.usage(),
            tiers=self._kv.tiers.stats(),
        )

    @property
    def at_rest(self) -> bool:
        """Whether the core can end without losing blocks: no store to a lower tier is running or due."""
        return not self._ready or self._kv.tiers.is_idle(self._clock())

    def check(self) -> None:
        """Assert that nothing leaked in any owner."""
        self.scheduler.check()
