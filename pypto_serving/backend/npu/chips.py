"""Chips: watch the processes that the runtime forks, from their start."""

from __future__ import annotations

import logging
import os
import select
import struct

from pypto_serving.backend.base import Fault
from pypto_serving.errors import EXIT_CRASH
from pypto_serving.threads import start_thread

log = logging.getLogger(__name__)

_PID = struct.Struct("=i")


class Chips:
    """Ends this process when a process that it forks from now on, or one of `others`, ends; not while `closing`.

    The runtime does not notice such an end, and its calls would never return. `fault` is called first.
    """

    def __init__(self, *others: int) -> None:
        self.closing = False
        self.fault: Fault = lambda message, _: log.error(message)
        self._heard, self._said = os.pipe()
        self._ends = {os.pidfd_open(pid): pid for pid in others}
        os.register_at_fork(after_in_child=self._say_pid)
        start_thread("chip-watch", self._watch)

    def _say_pid(self) -> None:
        """Send the pid of the new process to its parent."""
        os.write(self._said, _PID.pack(os.getpid()))

    def _watch(self) -> None:
        poller = select.poll()
        for known in (self._heard, *self._ends):
            poller.register(known, select.POLLIN)
        while not self.closing:
            for ready, _ in poller.poll():
                if ready != self._heard:
                    self._lose(self._ends[ready])
                    continue
                (pid,) = _PID.unpack(os.read(self._heard, _PID.size))
                try:
                    end = os.pidfd_open(pid)
                except ProcessLookupError:  # it ended, and somebody waited for it already
                    self._lose(pid)
                    continue
                self._ends[end] = pid
                poller.register(end, select.POLLIN)

    def _lose(self, pid: int) -> None:
        if not self.closing:
            self.fault(f"a process of the npu backend ended (pid {pid})", EXIT_CRASH)
            os._exit(EXIT_CRASH)
