"""A worker that fails on purpose: `python -m tests.faulty_worker FD`.

`backend_options["faults"]` maps an epoch (as a string) to [point, nth step]. The worker is killed while loading
("load"), loses a rank that loads ("rank") or has it stopped ("stop"), or has a process like a rank that stays behind
("leave"). At that step of that life it is killed before computing ("before") or between sampling and sending ("after"),
stops answering ("hang"), raises ("raise"), or from then on takes long to end ("linger"). `backend_options["poison"]`
names a token id that kills every step that computes it, `backend_options["stalled"]` an epoch whose loads from host
memory hang. With `backend_options["instant"]`, transfers say that they took no time, so that none is refused for its
measured speed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from functools import partial
from typing import Any

from pypto_serving.backend.ranks import supervisor
from pypto_serving.processes import Child, Parent, start_copy
from pypto_serving.store.host import HostStore
from pypto_serving.types.arrays import unpack_ids
from pypto_serving.types.start import WorkerStart
from pypto_serving.types.step import StepPlan, StepResult
from pypto_serving.types.tier import TransferDone
from pypto_serving.worker import transfer
from pypto_serving.worker.__main__ import run
from pypto_serving.worker.runner import Runner

LINGER_S = 2.0
RANK_SIGNALS = {"rank": signal.SIGKILL, "stop": signal.SIGSTOP}
"""What ranks get as soon as they are started."""


class FaultyRunner:
    """A Runner with a fate."""

    def __init__(self, runner: Runner, point: str, step: int, poison: int | None) -> None:
        self.runner, self.point, self.step, self.poison = runner, point, step, poison
        self.num_submitted = self.num_collected = 0
        self.held = deque[list[tuple[int, int, int]]]()

    @property
    def num_in_flight(self) -> int:
        return self.runner.num_in_flight

    @property
    def is_full(self) -> bool:
        return self.runner.is_full

    def submit_plan(self, plan: StepPlan) -> None:
        self.num_submitted += 1
        due = self.num_submitted == self.step
        if due and self.point == "raise":
            raise RuntimeError("a kernel failed on purpose")
        if due and self.point == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if due and self.point == "linger":
            linger()
        if due and self.point == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        self.runner.submit_plan(plan)
        rows, counts = unpack_ids(plan.rows).tolist(), unpack_ids(plan.num_tokens).tolist()
        ends = self.runner.batch.num_computed[rows].tolist()
        self.held.append([(row, end - count, end) for row, count, end in zip(rows, counts, ends, strict=True)])

    def collect_result(self) -> StepResult:
        result = self.runner.collect_result()
        self.num_collected += 1
        due = self.num_collected == self.step and self.point == "after"
        tokens, held = self.runner.batch.tokens, self.held.popleft()
        if due or (self.poison is not None and any(self.poison in tokens[row, begin:end] for row, begin, end in held)):
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def linger() -> None:
    """Start a process that keeps our files open for LINGER_S after we end, as if much memory had to be freed first."""
    ours = os.getpid()
    if os.fork() == 0:
        os.setsid()  # nothing hurries it
        while os.getppid() == ours:
            time.sleep(0.01)
        time.sleep(LINGER_S)
        os._exit(0)


def hang(*arguments: Any) -> Any:
    """Never return, as a call to a disk or network that is gone."""
    threading.Event().wait()


def signalled_child(number: signal.Signals, *arguments: Any, **options: Any) -> Child:
    """Start a child, and send it a signal at once."""
    child = start_copy(*arguments, **options)
    os.kill(child.pid, number)
    return child


def done_at_once(job_id: int, done: bytes, elapsed_s: float, writable: bool) -> TransferDone:
    """The result of a transfer that took no time."""
    return TransferDone(job_id, done, 0.0, writable)


def main() -> None:
    parent = Parent.of_module(WorkerStart)
    options = parent.start.config.worker.backend_options
    point, step = options.get("faults", {}).get(str(parent.start.epoch), ["", 0])
    if point == "load":
        os.kill(os.getpid(), signal.SIGKILL)
    if point in RANK_SIGNALS:
        supervisor.start_copy = partial(signalled_child, RANK_SIGNALS[point])  # type: ignore[attr-defined]
    if point == "leave":
        subprocess.Popen(["sleep", "1000"], pass_fds=parent.start.descendants, start_new_session=True)
    if options.get("stalled") == parent.start.epoch:
        HostStore.load = hang  # type: ignore[method-assign]
    if options.get("instant"):
        transfer.TransferDone = done_at_once  # type: ignore[attr-defined,assignment,misc]
    run(parent, lambda runner: FaultyRunner(runner, point, step, options.get("poison")))


if __name__ == "__main__":
    main()
