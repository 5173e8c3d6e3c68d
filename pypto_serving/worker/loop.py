"""The worker's loop over any channel: plans in, results out, a beat when idle."""

from __future__ import annotations

from pypto_serving.ipc import Channel
from pypto_serving.types.step import StepPlan, StopWorker, ToWorker, WorkerBeat, WorkerHello
from pypto_serving.worker.runner import PlanExecutor


def serve(channel: Channel[ToWorker], hello: WorkerHello, runner: PlanExecutor, heartbeat_s: float) -> None:
    """Say hello, then execute plans in order until told to stop."""
    channel.send(hello)
    while True:
        message = channel.receive(heartbeat_s)
        if message is None:
            channel.send(WorkerBeat(hello.epoch))
        elif isinstance(message, StepPlan):
            channel.send(runner.execute(message))
        elif isinstance(message, StopWorker):
            return
