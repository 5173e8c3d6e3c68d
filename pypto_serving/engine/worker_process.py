"""Executor: start a worker, watch it, and restart it when it dies or hangs."""

from __future__ import annotations

import logging
import math
import os
import select
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from pypto_serving.engine.respawns import RespawnLimit
from pypto_serving.errors import EXIT_ENGINE, EXIT_MODEL, EXIT_USAGE
from pypto_serving.ipc import SocketChannel
from pypto_serving.processes import Child, ChildFault, ChildProgress, Descendants, start_module
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import WorkerStart
from pypto_serving.types.step import FromWorker, StepPlan, StepResult, StopWorker, WorkerHello
from pypto_serving.types.tier import Tier, TransferReport, Transfers

log = logging.getLogger(__name__)

HELD_UP_HEARTBEATS = 3
STOP_PATIENCE_S = 1.0
RANK_PATIENCE_S = 60.0
"""Limit of the wait for the ranks of an ended worker."""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """Event: a worker's life ended unexpectedly; another one follows."""

    reason: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """Event: the worker is not restarted any more."""

    reason: str
    exit_code: int


WorkerEvent = WorkerHello | StepResult | TransferReport | ChildProgress | WorkerDown | GaveUp


class Executor(Protocol):
    """The interface of a worker for the engine core, for processes and in-memory workers alike."""

    def poll(self, now_s: float) -> list[WorkerEvent]:
        """Return all events since the last call, in order. Start and restart the worker as needed."""

    def send_plan(self, plan: StepPlan) -> None:
        """Send a plan to the worker whose hello came last."""

    def send_transfers(self, transfers: Transfers) -> None:
        """Send transfers to the worker whose hello came last."""

    def forgive_deaths(self) -> None:
        """Forget the last deaths, since a failed request explains them."""

    def replace_worker(self, hanging: tuple[Tier, ...]) -> None:
        """End the worker because transfers hang. Its next life does not use the tiers `hanging`."""

    def stop(self) -> None:
        """End the worker within a second or so."""


def open_host_memory(config: EngineConfig) -> int:
    """Open memory for the host tier, which outlives workers, as a file. Return -1 without a host tier."""
    return os.memfd_create("pypto-kv") if any(tier.tier == "host" for tier in config.cache.tiers) else -1


class WorkerProcess:
    """Owns one worker process and its channels. Implements Executor.

    A worker is lost when:

    - its control pipe closes;
    - it is idle and silent for `silent_s`;
    - a step takes longer than `step_timeout_s`;
    - loading shows no progress for `load_timeout_s`;
    - the core has it replaced.

    Waits between lives double until a step is completed; `RespawnLimit` bounds the number of lives. The next life
    starts when all ranks of the last have ended. Each worker inherits the file descriptors `inherited`. `respawned`: an
    earlier core had a worker before. Call `poll` at least once per heartbeat. A gap of more than HELD_UP_HEARTBEATS
    means that this process itself was stopped; then a worker's silence proves nothing.
    """

    def __init__(self, config: EngineConfig, inherited: tuple[int, ...] = (), respawned: bool = False) -> None:
        self.config = config
        self.epoch = 0
        self._inherited, self._respawned = inherited, respawned
        self._child: Child | None = None
        self._channel: SocketChannel[FromWorker] | None = None
        self._transfers: SocketChannel[TransferReport] | None = None
        self._descendants: Descendants | None = None
        self._host_memory = open_host_memory(config)
        self._up = False
        self._gave_up = False
        self._deaths = RespawnLimit("the worker", config.faults.max_respawns, config.faults)
        self._restart_s = 0.0
        self._last_message_s = 0.0
        self._sent_s: deque[float] = deque()
        self._now_s = 0.0
        self._fault: ChildFault | None = None
        self._replaced = False
        self._left_out: tuple[Tier, ...] = ()

    def poll(self, now_s: float) -> list[WorkerEvent]:
        if now_s - self._now_s > HELD_UP_HEARTBEATS * self.config.faults.heartbeat_s:
            self._last_message_s = now_s
        self._now_s = now_s
        if self._gave_up:
            return []
        if self._child is None:
            if now_s >= self._restart_s and self._ranks_ended():
                self._start()
            return []
        events = self._receive_events()
        reason = self._find_loss()
        if reason is not None:
            events.append(self._lose_worker(reason))
        return events

    def _start(self) -> None:
        self.epoch += 1
        self._channel, end = SocketChannel.pair(FromWorker)
        self._transfers, transfers_end = SocketChannel.pair(TransferReport)
        self._descendants = Descendants()
        ends = (end, transfers_end, self._descendants.end)
        channel, transfers, own = (end.fileno() for end in ends)
        descendants = (own, *self._inherited)
        lives = (self.epoch, self._respawned or self.epoch > 1)
        start = WorkerStart(self.config, channel, transfers, self._host_memory, descendants, *lives, self._left_out)
        shared = (*(fd for fd in (self._host_memory,) if fd >= 0), *self._inherited)
        self._child = start_module(self.config.worker.worker_module, start, *ends, shared=shared, leads=True)
        self._last_message_s = self._now_s
        log.info("worker %d started, pid %d", self.epoch, self._child.pid)

    def _ranks_ended(self) -> bool:
        """Return whether the ranks of the last worker have ended, which frees its memory."""
        if self._descendants is not None:
            if not self._descendants.ended() and self._now_s < self._restart_s + RANK_PATIENCE_S:
                return False
            self._descendants.close()
            self._descendants = None
        return True

    def _receive_events(self) -> list[WorkerEvent]:
        assert self._child is not None and self._channel is not None and self._transfers is not None
        events: list[WorkerEvent] = []
        for message in self._child.messages():
            self._last_message_s = self._now_s
            if isinstance(message, ChildFault):
                self._fault = message
            else:
                events.append(message)
        while (said := self._channel.receive()) is not None:
            self._last_message_s = self._now_s
            if isinstance(said, WorkerHello):
                self._up = True
                self._left_out = ()
                events.append(said)
            elif isinstance(said, StepResult) and said.epoch == self.epoch:
                self._sent_s.popleft()
                self._deaths.count_step()
                events.append(said)
        while (report := self._transfers.receive()) is not None:
            if report.epoch == self.epoch:
                events.append(report)
        return events

    def _find_loss(self) -> str | None:
        """Return why the worker counts as lost, or None."""
        assert self._child is not None
        faults, silent_s = self.config.faults, self._now_s - self._last_message_s
        if self._child.gone:
            return "it ended"
        if self._replaced:
            tiers = " and ".join(self._left_out)
            return f"transfers with {tiers} hang, and requests wait for their blocks; the next worker goes without"
        if not self._up and silent_s > faults.load_timeout_s:
            return f"it made no progress in loading for {faults.load_timeout_s:.0f} s"
        if self._up and self._sent_s:
            running_s = self._now_s - max(self._sent_s[0], self._last_message_s)
            if running_s > faults.step_timeout_s:
                return f"a step took more than {faults.step_timeout_s:.0f} s"
        elif self._up and silent_s > faults.silent_s:
            return f"it was silent for {silent_s:.1f} s"
        return None

    def _lose_worker(self, reason: str) -> WorkerEvent:
        code = self._close(patience_s=STOP_PATIENCE_S if reason == "it ended" else 0)
        fault, self._fault = self._fault, None
        too_many = self._deaths.count_death(self._now_s)
        if fault is not None and fault.exit_code in (EXIT_MODEL, EXIT_USAGE, EXIT_ENGINE):
            return self._give_up(fault.message, fault.exit_code)
        cause = fault.message if fault is not None else f"{reason} (exit code {code})"
        if too_many:
            return self._give_up(f"{too_many}; last: {cause}", EXIT_ENGINE)
        delay_s = self.config.faults.respawn_delay_s * 2 ** (self._deaths.in_a_row - 1)
        self._restart_s = self._now_s + delay_s
        log.warning("worker %d is lost: %s; starting another in %.1f s", self.epoch, cause, delay_s)
        return WorkerDown(cause)

    def _give_up(self, reason: str, exit_code: int) -> GaveUp:
        self._gave_up = True
        return GaveUp(reason, exit_code)

    def _close(self, patience_s: float) -> int | None:
        code = None
        if self._child is not None and self._descendants is not None:
            code = self._child.end(patience_s)
            self._descendants.kill(self._child.pid)  # a rank that is just starting does not notice its leader's end
        for channel in (self._channel, self._transfers):
            if channel is not None:
                channel.close()
        self._child = self._channel = self._transfers = None
        self._up = self._replaced = False
        self._sent_s.clear()
        return code

    def forgive_deaths(self) -> None:
        self._deaths.forgive_deaths()
        self._restart_s = min(self._restart_s, self._now_s + self.config.faults.respawn_delay_s)

    def replace_worker(self, hanging: tuple[Tier, ...]) -> None:
        self._replaced, self._left_out = True, hanging

    def send_plan(self, plan: StepPlan) -> None:
        assert self._channel is not None
        self._sent_s.append(self._now_s)
        self._channel.send(msgspec.structs.replace(plan, epoch=self.epoch))

    def send_transfers(self, transfers: Transfers) -> None:
        assert self._transfers is not None
        self._transfers.send(msgspec.structs.replace(transfers, epoch=self.epoch))

    def stop(self) -> None:
        if self._channel is not None:
            self._channel.send(StopWorker())
        self._close(STOP_PATIENCE_S)
        if self._descendants is not None:
            self._descendants.close()
        self._gave_up = True

    def wait(self, api: SocketChannel[Any], timeout_s: float) -> None:
        """Sleep until a message arrives from the API process or the worker, or until the timeout."""
        poller = select.poll()
        ours: tuple[SocketChannel[Any] | None, ...] = (api, self._channel, self._transfers)
        channels = [channel for channel in ours if channel is not None and not channel.gone]
        for channel in channels:
            poller.register(channel.socket, channel.events)
        if self._child is not None:
            poller.register(self._child.pipe, select.POLLIN)
        elif not self._gave_up and self._now_s < self._restart_s:
            timeout_s = min(timeout_s, self._restart_s - self._now_s)
        elif not self._gave_up and self._descendants is not None:
            poller.register(self._descendants.ours, select.POLLIN)
        poller.poll(math.ceil(timeout_s * 1000))
        for channel in channels:
            channel.flush()
