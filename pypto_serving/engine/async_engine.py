"""AsyncEngine: the client half of a replica, in the API process. Admit requests, stream outputs, watch the core."""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter

import msgspec

from pypto_serving.engine.client import Health, OutputStream
from pypto_serving.engine.respawns import RespawnLimit
from pypto_serving.errors import EXIT_ENGINE, EngineDeadError, PyptoError, QueueFullError, UnavailableError
from pypto_serving.ipc import SocketChannel
from pypto_serving.processes import Child, ChildFault, Descendants, start_module
from pypto_serving.threads import in_quick_thread, start_task
from pypto_serving.types.arrays import ID_BYTES
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import (
    AbortRequests,
    AddRequests,
    ClearCache,
    CoreFailed,
    CoreOutputs,
    CoreProgress,
    CoreReady,
    EngineRequest,
    FromCore,
    RequestFault,
    RequestOutput,
    ShutdownCore,
    StepStats,
    num_prompt_tokens,
)
from pypto_serving.types.start import CoreStart
from pypto_serving.types.tier import Tier
from pypto_serving.util import counted


class QueuedTokens:
    """Counts the prompt tokens of requests without a first token. Owned by AsyncEngine.

    A prompt shared by several requests of a submission counts once, until one of them has a token. If nothing else
    waits, a prompt of any length fits.
    """

    def __init__(self, max_tokens: int) -> None:
        """Allow at most `max_tokens`; 0 disables the limit and the counting."""
        self._max_tokens = max_tokens
        self._tokens: dict[str, int] = {}
        self.num_tokens = 0

    def fits(self, num_tokens: int) -> bool:
        """Return whether `num_tokens` more may wait."""
        return not self._max_tokens or not self.num_tokens or self.num_tokens + num_tokens <= self._max_tokens

    def enter(self, requests: Sequence[EngineRequest]) -> None:
        """Count the prompts of one submission."""
        if not self._max_tokens:
            return
        for ids, run in groupby(requests, attrgetter("token_ids")):
            self._tokens[next(run).request_id] = len(ids) // ID_BYTES
            self.num_tokens += len(ids) // ID_BYTES

    def leave(self, request_id: str) -> None:
        """Stop counting a request, which has a token or ended. Ignore uncounted requests."""
        self.num_tokens -= self._tokens.pop(request_id, 0)

    def forget_all(self) -> None:
        """Reset the count to 0."""
        self._tokens.clear()
        self.num_tokens = 0

    def __len__(self) -> int:
        """Return how many prompts wait."""
        return len(self._tokens)


log = logging.getLogger(__name__)

START_PATIENCE_S = 30.0
"""Extra silence that is allowed while a core imports its modules."""
LINGER_S, STOP_PATIENCE_S = 2.0, 8.0
WORKER_PATIENCE_S = 60.0
MAX_CORE_RESPAWNS = 3


class AsyncEngine:
    """Owns the engine core process and the streams of its requests. Lives in one event loop. Implements EngineClient.

    When a core dies, its requests end with a 503. Another core starts once the old worker has ended, which holds memory
    and the lock of the disk tier's folder until then. `RespawnLimit` bounds the number of cores; totals continue.

    Callbacks: `on_milestone` at the first and the last output of each request, `on_worker_lost` when a worker died and
    its requests continue, `on_lost` when all requests end with a core.
    """

    def __init__(self, config: EngineConfig, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        self.config = config
        self.stats = StepStats()
        self.on_stats: Callable[[StepStats], None] = lambda stats: None
        self.on_milestone: Callable[[RequestOutput], None] = lambda output: None
        self.on_worker_lost: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.ready: CoreReady | None = None
        self.engines = (self,)
        self._on_progress = on_progress or (lambda phase, done, total: None)
        self._streams: dict[str, OutputStream] = {}
        self._due: list[OutputStream] = []
        self._queued = QueuedTokens(config.scheduler.max_queued_tokens)
        self._child: Child | None = None
        self._channel: SocketChannel[FromCore] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._replacing: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._dead: PyptoError | None = None
        self._stopping = False
        self._descendants: Descendants | None = None
        self._workers_ended = asyncio.Event()
        self._deaths = RespawnLimit("the engine core", MAX_CORE_RESPAWNS, config.faults)
        self._past = StepStats()
        self._last_message_s = time.monotonic()
        self._finish_times: list[float] = []

    # Life of the core.

    async def start(self) -> None:
        """Start the core, which starts its worker; do not wait for either."""
        self._spawn()

    def _spawn(self) -> None:
        self._channel, end = SocketChannel.pair(FromCore)
        self._descendants = Descendants()
        self._workers_ended.clear()
        start = CoreStart(self.config, end.fileno(), self._descendants.end.fileno(), self.stats.epoch > 0)
        try:
            self._child = start_module("pypto_serving.engine", start, end, self._descendants.end)
        except OSError as error:
            self._die(f"the engine core cannot be started: {error}", EXIT_ENGINE)
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(self._child.pipe.fileno(), self._on_control)
        loop.add_reader(self._channel.socket.fileno(), self._read)
        self._last_message_s = time.monotonic() + START_PATIENCE_S
        self._watcher = start_task("core-watch", self._watch(self._child), self._lose_sight)

    async def wait_ready(self) -> None:
        """Wait until a worker is ready. Raise the error if the replica gives up."""
        while self.ready is None:
            if self._dead is not None:
                raise self._dead
            self._wake.clear()
            await self._wake.wait()

    async def wait_dead(self) -> PyptoError:
        """Wait until the replica gives up, and return the reason."""
        while self._dead is None:
            self._wake.clear()
            await self._wake.wait()
        return self._dead

    async def stop(self) -> None:
        """End the core and its worker. Unfinished requests end with a 503."""
        self._stopping = True
        self._workers_ended.set()
        self.give_up_all()
        self._send(ShutdownCore())
        if self._replacing is not None:
            await asyncio.wait([self._replacing])  # its error is known already
        await self._close(STOP_PATIENCE_S)
        if self._descendants is not None:
            self._descendants.close()
            self._descendants = None

    async def _close(self, patience_s: float) -> None:
        """End the core and close its channel. Until another core starts, requests are refused."""
        loop = asyncio.get_running_loop()
        child, self._child = self._child, None
        channel, self._channel = self._channel, None
        if channel is not None:
            loop.remove_reader(channel.socket.fileno())
            loop.remove_writer(channel.socket.fileno())
        if child is not None:
            loop.remove_reader(child.pipe.fileno())
            if channel is not None and not child.gone:  # it has yet to be told to end, perhaps after long prompts
                await in_quick_thread(channel.linger, LINGER_S)
            await in_quick_thread(child.end, patience_s)
        if self._watcher is not None:
            self._watcher.cancel()
        if channel is not None:
            channel.close()

    def _on_control(self) -> None:
        assert self._child is not None
        for message in self._child.messages():
            if isinstance(message, ChildFault):
                self._die(message.message, message.exit_code)
        if self._child.gone:
            asyncio.get_running_loop().remove_reader(self._child.pipe.fileno())
            self._replacing = start_task("core-replacement", self._replace_core(), self._lose_sight)

    def _lose_sight(self, error: BaseException) -> None:
        self._die(f"the engine core cannot be watched or replaced: {error}", EXIT_ENGINE)

    async def _watch(self, child: Child) -> None:
        """Kill a core that has sent nothing for `silent_s`; its death is then handled like any other.

        A late tick means that this process itself was stopped, so the silence proves nothing.
        """
        heartbeat_s, silent_s = self.config.faults.heartbeat_s, self.config.faults.silent_s
        while True:
            slept_s = -time.monotonic()
            await asyncio.sleep(heartbeat_s)
            slept_s += time.monotonic()
            if slept_s < 2 * heartbeat_s and time.monotonic() - self._last_message_s > silent_s:
                log.error("the engine core is silent for %.0f s; ending it", time.monotonic() - self._last_message_s)
                child.process.kill()
                return

    async def _replace_core(self) -> None:
        """Handle a core that ended unexpectedly: end its requests with a 503 and start another core."""
        if self._stopping:
            return
        self.ready = None
        self._fail_all(RequestFault(503, "core_lost", "the engine core ended unexpectedly; send the request again"))
        await self._close(STOP_PATIENCE_S)
        await self._outlive_workers()
        self.stats = self._past = self.stats.ended()
        too_many = self._deaths.count_death(time.monotonic())
        if self._dead is None and too_many:
            self._die(too_many, EXIT_ENGINE)
        if self._dead is None and not self._stopping:
            log.warning("the engine core ended unexpectedly; starting another")
            self._spawn()

    async def _outlive_workers(self) -> None:
        """Wait until the workers of an ended core have ended, or until `stop` is called."""
        descendants, self._descendants = self._descendants, None
        assert descendants is not None
        loop, ours = asyncio.get_running_loop(), descendants.ours.fileno()
        loop.add_reader(ours, self._workers_ended.set)
        try:
            await asyncio.wait_for(self._workers_ended.wait(), WORKER_PATIENCE_S)
        except TimeoutError:
            log.warning("the worker of the last engine core has not ended after %.0f s", WORKER_PATIENCE_S)
        finally:
            loop.remove_reader(ours)
            descendants.close()

    def _die(self, message: str, exit_code: int) -> None:
        self._dead = EngineDeadError(message, exit_code)
        self.ready = None
        self._fail_all(RequestFault(503, "engine_dead", message))
        self._wake.set()

    # Messages from the core.

    def _read(self) -> None:
        channel = self._channel
        while channel is not None and (message := channel.receive()) is not None:
            self._last_message_s = time.monotonic()
            self._handle_message(message)
        self._deliver()
        if channel is not None and channel.gone:
            asyncio.get_running_loop().remove_reader(channel.socket.fileno())

    def _handle_message(self, message: FromCore) -> None:
        if isinstance(message, CoreOutputs):
            self._take_outputs(message)
        elif isinstance(message, CoreProgress):
            self._on_progress(message.phase, message.done, message.total)
        elif isinstance(message, CoreReady):
            self.ready = message
            if message.kv_events is not None:  # the next core reuses these ports
                endpoint, replay = message.kv_events
                cache = msgspec.structs.replace(self.config.cache, kv_events=endpoint, kv_events_replay=replay)
                self.config = msgspec.structs.replace(self.config, cache=cache)
            self._wake.set()
        elif isinstance(message, CoreFailed):
            self._die(message.message, message.exit_code)

    def _take_outputs(self, message: CoreOutputs) -> None:
        stats = message.stats.after(self._past) if self._past.num_core_respawns else message.stats
        if stats.num_steps > self.stats.num_steps:
            self._deaths.count_step()
        if stats.num_respawns > self.stats.num_respawns:
            self.on_worker_lost()
        self.stats = stats
        self.on_stats(stats)
        stream_of, due = self._streams.get, self._due.append
        for output in message.outputs:
            stream = stream_of(output.request_id)
            if stream is None:
                continue
            if stream.push(output):
                due(stream)
            if output.finish_reason is not None:
                del self._streams[output.request_id]
                self._queued.leave(output.request_id)
                self._finish_times = [*self._finish_times[-63:], time.monotonic()]
                self.on_milestone(output)
            elif output.timeline is not None:
                self._queued.leave(output.request_id)
                self.on_milestone(output)

    def _deliver(self) -> None:
        """Deliver all outputs read so far, from any number of steps, in one call per stream."""
        due, self._due = self._due, []
        for stream in due:
            stream.deliver()

    def _fail_all(self, fault: RequestFault) -> None:
        streams, self._streams = self._streams, {}
        self._queued.forget_all()
        for request_id, stream in streams.items():
            if stream.push(RequestOutput(request_id=request_id, finish_reason="error", fault=fault)):
                self._due.append(stream)
        self._deliver()
        self.on_lost()

    # Requests.

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        stream = OutputStream([request.request_id for request in requests], self.abort)
        self.submit_to(stream, requests)
        return stream

    def submit_to(self, stream: OutputStream, requests: Sequence[EngineRequest]) -> None:
        """Submit requests, and send their outputs to the caller's stream; see `submit`."""
        self.require_admission(len(requests), num_prompt_tokens(requests))
        for message in AddRequests.pack(requests):
            self._send(message)
        self._queued.enter(requests)
        self._streams |= dict.fromkeys([request.request_id for request in requests], stream)

    def require_admission(self, count: int, num_tokens: int = 0) -> None:
        if self._dead is not None or self._stopping:
            raise UnavailableError(str(self._dead or "the server is shutting down"))
        if self._channel is None:
            raise UnavailableError("the engine core is being replaced; try again in a moment")
        unfinished, config = len(self._streams), self.config
        if unfinished + count > config.max_unfinished:
            waiting = max(0, unfinished - config.limits.max_num_seqs)
            raise QueueFullError(
                f"this server has {counted(unfinished, 'unfinished request')}; it runs {config.limits.max_num_seqs} "
                f"at once and queues {config.scheduler.max_queued_requests}; try again later",
                self._retry_after_s(waiting),
            )
        if not self._queued.fits(num_tokens):
            raise QueueFullError(
                f"this server has prompts of {self._queued.num_tokens} tokens that wait, and queues at most "
                f"{config.scheduler.max_queued_tokens}; try again later",
                self._retry_after_s(max(1, len(self._queued))),
                limit="max_num_queued_tokens",
            )

    def _retry_after_s(self, waiting: int) -> int:
        """Estimate the seconds until the queue has room, in [1, 60], from the rate of recently finished requests."""
        times = self._finish_times
        if len(times) < 2 or times[-1] == times[0]:
            return 1
        rate = (len(times) - 1) / (times[-1] - times[0])
        return max(1, min(60, round(waiting / rate)))

    def give_up_all(self) -> None:
        self._fail_all(RequestFault(503, "unavailable", "the server is shutting down"))

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without a further output. Ignore unknown ids."""
        known = [request_id for request_id in request_ids if request_id in self._streams]
        for request_id in known:
            self._streams.pop(request_id).forget(request_id)
            self._queued.leave(request_id)
        if known:
            self._send(AbortRequests(known))

    def clear_cache(self, tiers: Sequence[Tier]) -> None:
        if self._channel is None:
            raise UnavailableError("the engine is being started; try again in a moment")
        self._send(ClearCache(tuple(tiers)))

    def _send(self, message: msgspec.Struct) -> None:
        channel = self._channel
        if channel is not None:
            channel.send(message)
            if channel.events & select.POLLOUT:
                asyncio.get_running_loop().add_writer(channel.socket.fileno(), self._write)

    def _write(self) -> None:
        """Send data that the socket did not accept before."""
        channel = self._channel
        if channel is not None:
            channel.flush()
            if not channel.events & select.POLLOUT:
                asyncio.get_running_loop().remove_writer(channel.socket.fileno())

    # Health.

    @property
    def kv_events(self) -> list[tuple[str, str]]:
        """Return the endpoints of KV events and of their replay, once a worker is ready; [] if they are off."""
        return [self.ready.kv_events] if self.ready is not None and self.ready.kv_events is not None else []

    def health(self) -> Health:
        """Return whether requests make progress: 'loading', 'ready', 'stalled', 'silent' or 'dead'."""
        now_s, faults, stats = time.monotonic(), self.config.faults, self.stats
        age_s = max(0.0, now_s - stats.last_step_s) if stats.last_step_s else 0.0
        if self._dead is not None:
            return Health(False, "dead", str(self._dead), age_s)
        if now_s - self._last_message_s > faults.silent_s:
            return Health(False, "silent", f"the engine core is silent for {now_s - self._last_message_s:.0f} s", age_s)
        if self.ready is None or not stats.ready:
            return Health(False, "loading", "no worker is ready", age_s)
        if stats.work_since_s and now_s - max(stats.last_step_s, stats.work_since_s) > faults.step_timeout_s:
            return Health(False, "stalled", f"requests are unfinished and no step completed for {age_s:.0f} s", age_s)
        return Health(True, "ready", "", age_s)
