"""The worker's loop over any channel: plans in, results out, a beat when idle."""

from __future__ import annotations

from collections.abc import Callable

from pypto_serving.ipc import Channel
from pypto_serving.types.step import StepPlan, ToWorker, WorkerBeat, WorkerHello
from pypto_serving.worker.runner import PlanExecutor


def serve(
    channel: Channel[ToWorker],
    hello: WorkerHello,
    runner: PlanExecutor,
    heartbeat_s: float,
    step_done: Callable[[int], None] = lambda step_id: None,
) -> None:
    """Say hello, then execute plans in order, each followed by `step_done`, until told to stop."""
    channel.send(hello)
    while (message := answer(channel, runner, heartbeat_s)) is None or isinstance(message, StepPlan):
        if message is None:
            channel.send(WorkerBeat(hello.epoch))
        else:
            step_done(message.step_id)


def answer(channel: Channel[ToWorker], runner: PlanExecutor, timeout_s: float) -> ToWorker | None:
    """Wait for a message and, if it is a plan, execute it and send the result; returns the message."""
    message = channel.receive(timeout_s)
    if isinstance(message, StepPlan):
        channel.send(runner.execute(message))
    return message
