"""Start and watch the processes of the ranks on this host.

The worker is the leader. The others are copies of it, or of the process that another host runs (`joining_host.py`).
The ranks load their parts of the model at the same time, then replay the steps that the leader publishes.
When a rank ends, the leader ends; when the leader ends, all end.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from pypto_serving.backend.base import Fault, Progress
from pypto_serving.backend.ranks.host_connections import ControlConnection
from pypto_serving.backend.ranks.shared_steps import READY
from pypto_serving.errors import EXIT_OK, FINAL_ERRORS, PyptoError
from pypto_serving.kernels import RanksGone
from pypto_serving.parallel.topology import Rank
from pypto_serving.processes import Child, ChildFault, Parent, start_copy
from pypto_serving.threads import exit_code_of, start_thread
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import RankStart

LOADING = "weights"
"""Name of the phase in which all ranks load."""

PATIENCE_S = 1.0
"""Limit of the wait for the exit of a process whose pipe has closed."""
BLAME_S = 3.0
"""Limit of the wait to find out which process ended first."""
PER_MILLE = 1000
"""Total of the progress until the leader knows its own."""


class RankError(PyptoError):
    """A rank ended without reporting a reason."""


class RankSupervisor:
    """Owns the processes of the other ranks of this host, and watches the connection to the other host.

    A rank that gives up a step because another rank has ended does so without a fault; it is not to blame.
    """

    def __init__(self) -> None:
        self._members: dict[str, Child | ControlConnection] = {}
        self._loaded: dict[str, float] = {}
        self._ready: set[str] = set()
        self._left: dict[str, float] = {}
        self._total = PER_MILLE
        self._watching: threading.Thread | None = None

    def start(
        self,
        run: Callable[[Parent[RankStart]], None],
        config: EngineConfig,
        ranks: Sequence[Rank],
        memory: int,
        links: Mapping[int, Mapping[str, int]],
        descendants: tuple[int, ...] = (),
    ) -> None:
        """Start copies of this process that `run` one rank each.

        They inherit `memory`, `descendants` and `links` (the connections of each rank), which are closed in this
        process. Raises RankError if one cannot be started.
        """
        for rank in ranks:
            own, name = links.get(rank.index, {}), f"rank {rank.index}"
            start, shared = RankStart(config, rank.index, memory, dict(own)), (memory, *own.values(), *descendants)
            try:
                self.add(name, start_copy(run, start, shared, name))
            except OSError as error:
                raise RankError(f"{name} cannot be started ({error})") from None
            for fd in own.values():
                os.close(fd)

    def add(self, name: str, member: Child | ControlConnection, ready: bool = False) -> None:
        """Watch a process or a host, and take its reports. If it is `ready`, expect only faults."""
        self._members[name], self._loaded[name] = member, float(ready)
        if ready:
            self._ready.add(name)

    def end(self) -> None:
        """End the processes."""
        for member in self._members.values():
            if isinstance(member, Child):
                member.end(0)

    def reporting(self, progress: Progress) -> Progress:
        """Return a callback for the leader's progress, which passes on the progress of the slowest rank.

        The callback raises ModelError, ConfigError or RankError as soon as a rank has failed.
        """

        def report(phase: str, done: int, total: int) -> None:
            self._take_reports()
            if phase == LOADING:
                self._total = total
                done = min(done, self._slowest())
            progress(phase, done, total)

        return report

    def _slowest(self) -> int:
        """Return the smallest share that any rank has loaded of its own total, times the leader's total.

        Return the whole total only once all ranks are ready, since it ends the phase.
        """
        are_ready = len(self._ready) == len(self._members)
        return self._total if are_ready else min(int(self._total * min(self._loaded.values())), self._total - 1)

    def await_ready(self, progress: Progress) -> None:
        """Wait until all ranks are ready. Raises the errors of `reporting`."""
        while len(self._ready) < len(self._members):
            self._sleep()
            self._take_reports()
            progress(LOADING, self._slowest(), self._total)

    def _take_reports(self) -> None:
        """Process reports. Raise the error of a failed rank, or after BLAME_S that of a rank that gave up a step."""
        for name, member in self._present():
            messages = member.messages()
            if member.gone:
                messages += member.messages()  # messages that arrived in between
            for message in messages:
                if isinstance(message, ChildFault):
                    raise _error(message)
                self._loaded[name] = 1.0 if message.phase == READY else message.done / max(1, message.total)
                if message.phase == READY:
                    self._ready.add(name)
            if member.gone:
                self._take_end(name, member)
        for name, left_s in self._left.items():
            if time.monotonic() >= left_s + BLAME_S:
                raise RankError(f"{name} gave up a step")

    def _take_end(self, name: str, member: Child | ControlConnection) -> None:
        """Record that a rank ended after it gave up a step; raise RankError for any other end."""
        if isinstance(member, ControlConnection):
            raise RankError(f"{name} {member.gone}")
        code = member.end(PATIENCE_S)
        if code != EXIT_OK or name not in self._ready:
            raise RankError(f"{name} ended (exit code {code})")
        self._left[name] = time.monotonic()

    def _present(self) -> list[tuple[str, Child | ControlConnection]]:
        return [(name, member) for name, member in self._members.items() if name not in self._left]

    def _sleep(self) -> None:
        """Wait until a member reports or ends, or until BLAME_S have passed."""
        poller = select.poll()
        for _, member in self._present():
            poller.register(member.pipe, select.POLLIN)
        poller.poll(BLAME_S * 1000 if self._left else None)

    def watch(self, fault: Fault) -> None:
        """Report a fault and end this process when a rank ends: its threads may wait for that rank in a step."""

        def end(error: BaseException) -> NoReturn:
            fault(str(error), exit_code_of(error))
            os._exit(exit_code_of(error))

        self._watching = start_thread("rank-watch", self.await_end, end)

    def await_end(self) -> NoReturn:
        """Wait until a member ends. Raises the errors of `reporting`."""
        while True:
            self._sleep()
            self._take_reports()

    def blame(self) -> NoReturn:
        """Raise the error of the rank that made this one give up a step; see `reporting`.

        After `watch`, its thread reports the error instead, and ends this process. Raises RanksGone if none is found.
        """
        if self._watching is None:
            self.await_end()
        self._watching.join(BLAME_S)
        raise RanksGone


def _error(fault: ChildFault) -> PyptoError:
    return FINAL_ERRORS.get(fault.exit_code, RankError)(fault.message)
