"""Run the worker's loop over any channel: receive plans, send results, and send heartbeats when idle."""

from __future__ import annotations

from collections.abc import Callable

from pypto_serving.ipc import Channel
from pypto_serving.types.step import StopWorker, ToWorker, WorkerBeat, WorkerHello
from pypto_serving.worker.runner import PlanExecutor


def serve(
    channel: Channel[ToWorker],
    hello: WorkerHello,
    runner: PlanExecutor,
    heartbeat_s: float,
    step_done: Callable[[int], None] = lambda step_id: None,
) -> None:
    """Send `hello`, then execute plans in order until told to stop. Call `step_done` after each step.

    Collect a step when the program can hold no more, or when no message waits.
    """

    def finish() -> None:
        result = runner.collect()
        channel.send(result)
        step_done(result.step_id)

    channel.send(hello)
    while not isinstance(message := channel.receive(0.0 if runner.num_in_flight else heartbeat_s), StopWorker):
        if message is not None:
            runner.submit(message)
        elif not runner.num_in_flight:
            channel.send(WorkerBeat(hello.epoch))
        if runner.num_in_flight and (message is None or runner.is_full):
            finish()
    while runner.num_in_flight:
        finish()
