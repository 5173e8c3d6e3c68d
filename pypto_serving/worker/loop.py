"""Run the worker's loop over any channel: receive plans, send results, and send heartbeats when idle."""

from __future__ import annotations

from collections.abc import Callable

from pypto_serving.ipc import Channel
from pypto_serving.types.step import StopWorker, ToWorker, WorkerHeartbeat, WorkerHello
from pypto_serving.worker.runner import PlanExecutor

QUIET_S, PAUSE_S = 0.25, 0.005
"""How long no message must come for the worker to be idle, and to go on with what can wait."""


def serve(
    channel: Channel[ToWorker],
    hello: WorkerHello,
    runner: PlanExecutor,
    heartbeat_s: float,
    step_done: Callable[[int], None] = lambda step_id: None,
    idle: Callable[[], bool] = lambda: False,
) -> None:
    """Send `hello`, then execute plans in order until told to stop. Call `step_done` after each step.

    Collect a step when the program can hold no more, or when no message waits. While there is nothing to do, call
    `idle`, which does some of what can wait and returns whether more is left.
    """
    patience_s = QUIET_S

    def finish() -> None:
        result = runner.collect()
        channel.send(result)
        step_done(result.step_id)

    def wait_s() -> float:
        return 0.0 if runner.num_in_flight else min(patience_s, heartbeat_s)

    channel.send(hello)
    while not isinstance(message := channel.receive(wait_s()), StopWorker):
        if message is not None:
            runner.submit(message)
            patience_s = QUIET_S
        elif not runner.num_in_flight:
            patience_s = PAUSE_S if idle() else heartbeat_s
            channel.send(WorkerHeartbeat(hello.epoch))
        if runner.num_in_flight and (message is None or runner.is_full):
            finish()
    while runner.num_in_flight:
        finish()
