"""A real worker process and its executor, whose clock the tests turn."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest

from pypto_serving.engine.worker_process import WorkerDown, WorkerEvent, WorkerProcess
from pypto_serving.processes import ChildProgress
from pypto_serving.types.config import SILENT_BEATS, FaultConfig
from pypto_serving.types.step import WorkerHello
from tests.simulation import null_config

HEARTBEAT_S = 60.0
FAULTS = FaultConfig(heartbeat_s=HEARTBEAT_S, respawn_delay_s=0.01)


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def after(self, seconds: float) -> float:
        self.now_s += seconds
        return self.now_s


@pytest.fixture
def executor() -> Iterator[WorkerProcess]:
    executor = WorkerProcess(null_config(num_blocks=20, faults=FAULTS, depth=1))
    yield executor
    executor.stop()


def greeted(executor: WorkerProcess, clock: Clock) -> int:
    """Start a worker and stop it, with nothing of its own left to read; returns its pid."""
    while True:
        for event in executor.poll(clock.now_s):
            if isinstance(event, WorkerHello):
                os.kill(event.pid, signal.SIGSTOP)
                os.waitid(os.P_PID, event.pid, os.WSTOPPED | os.WNOWAIT)
                assert polled(executor, clock.now_s) == []
                return event.pid


def beats(executor: WorkerProcess, clock: Clock, count: int) -> list[WorkerEvent]:
    return [event for _ in range(count) for event in polled(executor, clock.after(HEARTBEAT_S))]


def polled(executor: WorkerProcess, now_s: float) -> list[WorkerEvent]:
    """Events but for progress, which has a pipe of its own and may be read after the greeting."""
    return [event for event in executor.poll(now_s) if not isinstance(event, ChildProgress)]


def test_a_worker_that_is_silent_for_long_is_lost(executor: WorkerProcess) -> None:
    greeted(executor, clock := Clock())
    assert beats(executor, clock, SILENT_BEATS - 1) == []
    (event,) = beats(executor, clock, 2)
    assert isinstance(event, WorkerDown) and "silent" in event.reason


def test_the_next_worker_waits_for_the_ranks_of_the_last() -> None:
    options = {"faults": {"1": ["leave", 0]}}
    config = null_config(
        num_blocks=20, faults=FAULTS, depth=1, worker_module="tests.faulty_worker", backend_options=options
    )
    executor, clock = WorkerProcess(config), Clock()
    try:
        worker = greeted(executor, clock)
        (rank,) = psutil.Process(worker).children()
        os.kill(worker, signal.SIGKILL)
        while not any(isinstance(event, WorkerDown) for event in executor.poll(clock.now_s)):
            time.sleep(0.002)
        for _ in range(10):
            executor.poll(clock.after(1.0))
        assert executor.epoch == 1
        rank.kill()
        while executor.epoch == 1:
            executor.poll(clock.now_s)
    finally:
        executor.stop()


def test_silence_while_the_core_itself_was_stopped_proves_nothing(executor: WorkerProcess) -> None:
    greeted(executor, clock := Clock())
    assert polled(executor, clock.after(1000 * HEARTBEAT_S)) == []
    assert beats(executor, clock, SILENT_BEATS - 1) == []
    (event,) = beats(executor, clock, 2)
    assert isinstance(event, WorkerDown)
