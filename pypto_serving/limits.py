"""Limits of the processes that a client's text can make slow or large: the reader and the guide.

They are expendable: what exceeds a limit ends the process, or its copy, that works on it, and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

from pypto_serving.util import GIB

CPU_S = 2.0
"""CPU time for one task: to read a body, to compile a grammar, or to follow a token.

Each MiB of a body may take as much more.
"""
MAX_BYTES = 2 * GIB
"""Memory that such a process may take for data."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Short of memory, the kernel ends the process with the highest score first: one of these, and not the worker."""


def cpu_limit_s(num_bytes: int) -> float:
    """Return the CPU time that a task of `num_bytes` may take."""
    return CPU_S * (1 + num_bytes / (1 << 20))


def limit_memory(num_bytes: int = MAX_BYTES) -> None:
    """Bound the memory of this process and its copies, which are the first to end where memory is short."""
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        OOM_SCORE.write_text("1000")


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after `seconds` more of CPU time; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


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
