"""Limits of the processes that a client's text can make slow or large: the reader and the guide.

They are expendable: what exceeds a limit ends the copy of a process that works on it, and nothing else.
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
"""CPU time to read a body, or to compile a grammar. Each MiB of a body may take as much more."""
TOKEN_S = 0.05
"""CPU time to follow one token of a grammar."""
MAX_BYTES = 2 * GIB
"""Memory that such a process may take for data."""
MAX_MATCHER_BYTES = 256 << 20
"""Memory for all grammars that a worker's rows follow; the memory plan counts it. One row may take a quarter."""
IDLE_S = 300.0
"""How long such a process stays without work."""
STUCK_S = 60.0
"""How long it may take to start, or be silent. CPU time has limits of its own."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Short of memory, the kernel ends the process with the highest score first: one of these, and not the worker."""
_THREAD_CPU_CLOCK = 3  # CLOCK_THREAD_CPUTIME_ID of Linux


def cpu_limit_s(num_bytes: int) -> float:
    """Return the CPU time that a body of `num_bytes` may take."""
    return CPU_S * (1 + num_bytes / (1 << 20))


def limit_memory() -> None:
    """Bound the memory of this process and its copies, which are the first to end where memory is short."""
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
    """Ends this process by SIGPROF when the thread that made it took too much CPU time, whatever other threads take."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._set_time, self._calls = libc.timer_settime, dict[float, Callable[[], object]]()
        self._timer = ctypes.c_void_p()
        event = _SignalEvent(None, signal.SIGPROF, 0)
        if libc.timer_create(_THREAD_CPU_CLOCK, ctypes.byref(event), ctypes.byref(self._timer)):
            raise OSError(ctypes.get_errno(), "the system has no timer for the CPU time of a thread")

    def __call__(self, seconds: float) -> None:
        """Allow `seconds` more; 0 for no limit."""
        if (call := self._calls.get(seconds)) is None:  # each token makes two
            spec = _TimerSpec(0, 0, int(seconds), int(seconds % 1 * 1e9))
            call = self._calls[seconds] = partial(self._set_time, self._timer, 0, ctypes.byref(spec), None)
        call()


class ProcessMemory:
    """Measures the memory of this process, and gives it back."""

    def __init__(self) -> None:
        self._page_bytes = resource.getpagesize()
        self._statm = -1
        with contextlib.suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def resident_bytes(self) -> int:
        """Return the memory in use; 0 if the system does not say."""
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 100, 0).split()[1]) * self._page_bytes

    def trim(self) -> None:
        """Give free memory back to the system."""
        if self._trim is not None:
            self._trim(0)
