"""The worker's loop: steps before what can wait, and heartbeats all the time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pypto_serving.backend.base import StepBuffers
from pypto_serving.backend.null.program import NullProgram
from pypto_serving.types.step import StepPlan, StepResult, StopWorker, WorkerHeartbeat
from pypto_serving.worker.loop import PAUSE_S, QUIET_S, serve
from pypto_serving.worker.runner import Runner, hello
from tests.simulation import VOCAB_SIZE, null_config

BEAT_S = 1.0


class Core:
    """The other end of the channel: it has `messages` in turn, None where nothing comes in time."""

    def __init__(self, messages: list[StepPlan | StopWorker | None]) -> None:
        self._messages: Iterator[StepPlan | StopWorker | None] = iter(messages)
        self.waits: list[float] = []
        self.sent: list[Any] = []

    def receive(self, timeout_s: float = 0.0) -> Any:
        self.waits.append(timeout_s)
        return next(self._messages)

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None:
        pass


def run(messages: list[StepPlan | StopWorker | None], pieces: list[bool]) -> tuple[Core, int]:
    """Serve on the null backend, where `idle` returns `pieces` in turn. Return the core and how many are left."""
    config, core, left = null_config(), Core(messages), list(pieces)
    program = NullProgram(config)
    buffers = [StepBuffers.in_host_memory(config.cache.groups, config.limits) for _ in range(config.num_buffers)]
    runner = Runner(program, buffers, VOCAB_SIZE)
    serve(core, hello(program, 0, 0.0), runner, BEAT_S, idle=lambda: left.pop(0))
    return core, len(left)


def plan(step_id: int) -> StepPlan:
    """Return a step of no rows."""
    return StepPlan(step_id=step_id, epoch=0, rows=b"", num_tokens=b"", new_rows=[], new_blocks=(b"",), drops=b"")


def test_what_can_wait_is_done_while_nothing_comes_and_again_after_a_step() -> None:
    pieces = [True, False, False, True, False, False]
    core, left = run([None, None, None, plan(1), None, None, None, StopWorker()], pieces)
    assert left == 0
    assert core.waits == [QUIET_S, PAUSE_S, BEAT_S, BEAT_S, QUIET_S, PAUSE_S, BEAT_S, BEAT_S]
    kinds = [type(message) for message in core.sent[1:]]
    assert kinds == [*[WorkerHeartbeat] * 3, StepResult, *[WorkerHeartbeat] * 3]


def test_steps_that_follow_each_other_leave_no_time_for_it() -> None:
    core, left = run([plan(1), plan(2), plan(3), StopWorker()], [False])
    assert left == 1
    assert [message.step_id for message in core.sent if isinstance(message, StepResult)] == [1, 2, 3]
