"""Limits of the processes that a client's text can make slow or large: the reader and the guide process.

Their copies are expendable: work that exceeds a limit ends only the copy that does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pypto_serving.util import GIB

CPU_S = 2.0
"""Limit of CPU time to read a body, or to compile a grammar. Each MiB of a body adds the same time."""
TOKEN_S = 0.05
"""Limit of CPU time to follow one token of a grammar."""
MAX_BYTES = 2 * GIB
"""Limit of such a process's memory for data."""
MAX_MATCHER_BYTES = 256 << 20
"""Limit of memory for all grammars of a worker's rows, part of the memory plan. One row may take a quarter."""
IDLE_S = 300.0
"""Such a process ends after this time without work."""
STUCK_S = 60.0
"""Limit of real time to start, or to be silent. CPU time has separate limits."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""If memory is short, the kernel ends the process with the highest score: one of these, not the worker."""
_THREAD_CPU_CLOCK = 3  # CLOCK_THREAD_CPUTIME_ID of Linux


def cpu_limit_s(num_bytes: int) -> float:
    """Return the limit of CPU time for a body of `num_bytes`."""
    return CPU_S * (1 + num_bytes / (1 << 20))


def limit_memory() -> None:
    """Limit the memory of this process and its copies; if memory is short, let the kernel end them first."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        OOM_SCORE.write_text("1000")


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after `seconds` more of CPU time; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


class _SignalEvent(ctypes.Structure):
    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_byte * 48),
    ]


class _TimerSpec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class ThreadCpuLimit:
    """Ends this process by SIGPROF when the thread that created this object exceeds a limit of CPU time."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set_time, self._calls = libc.timer_settime, dict[float, Callable[[], object]]()
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGPROF, 0)
        if libc.timer_create(_THREAD_CPU_CLOCK, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "the system has no timer for the CPU time of a thread")

    def __call__(self, seconds: float) -> None:
        """Allow `seconds` more; 0 for no limit."""
        if (call := self._calls.get(seconds)) is None:  # cached, since each token makes two calls
            spec = _TimerSpec(0, 0, int(seconds), int(seconds % 1 * 1e9))
            call = self._calls[seconds] = partial(self._set_time, self._timer, 0, ctypes.byref(spec), None)
        call()


class ProcessMemory:
    """Measures the memory of this process, and returns free memory to the system."""

    def __init__(self) -> None:
        self._page_bytes = resource.getpagesize()
        self._statm = -1
        with contextlib.suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def resident_bytes(self) -> int:
        """Return the memory in use; 0 if unknown."""
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 100, 0).split()[1]) * self._page_bytes

    def trim(self) -> None:
        """Return free memory to the system."""
        if self._trim is not None:
            self._trim(0)
