"""Limits of the processes that a client's text can make slow or large: the reader and the guide.

They are expendable: what exceeds a limit ends the process, or its copy, that works on it, and nothing else.
"""

from __future__ import annotations

import contextlib
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
    """Return the CPU time that a task of so many bytes may take."""
    return CPU_S * (1 + num_bytes / (1 << 20))


def limit_memory() -> None:
    """Bound the memory of this process and its copies, which are the first to end where memory is short."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        OOM_SCORE.write_text("1000")


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after so much more CPU time; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
