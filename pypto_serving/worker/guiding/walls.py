"""Walls: what one row may take of a guide process, in CPU time and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from pathlib import Path

from pypto_serving.types.guide import MAX_MATCHER_BYTES

OPEN_S, TOKEN_S = 4.0, 1.0
"""CPU time to compile a grammar with its first mask, and to follow a token. More of it ends the process.

The API's readers compile within 2 s, without the tokenizer.
"""
ROW_S, ROW_TOKEN_S = 3.0, 0.01
"""CPU time that a row may take in all to follow its output, and more of it for each of its tokens."""
WAIT_S = 10.0
"""How long a row waits for memory before it ends."""
ROW_BYTES = MAX_MATCHER_BYTES // 4
"""Memory that one row may take."""
BASE_BYTES = 1 << 30
"""Memory for all but the matchers. Beyond MAX_MATCHER_BYTES more than this the process ends."""
TRIM_BYTES = 8 << 20
"""When a row leaves that took so much, memory is given back to the system."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Short of memory, the kernel ends the process with the highest score first: this one, and not the worker."""


class Walls:
    """Limits this process, and measures its memory."""

    def __init__(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MATCHER_BYTES + BASE_BYTES,) * 2)
        with contextlib.suppress(OSError):  # some sandboxes have no such file
            OOM_SCORE.write_text("1000")
        self._page_bytes = resource.getpagesize()
        self._statm = -1
        with contextlib.suppress(OSError):
            self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

    def allow(self, seconds: float) -> None:
        """End this process by SIGPROF after so much more CPU time; 0 for no limit."""
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def resident(self) -> int:
        """Return the bytes of memory in use; 0 if the system does not tell."""
        if self._statm < 0:
            return 0
        return int(os.pread(self._statm, 100, 0).split()[1]) * self._page_bytes

    def trim(self) -> None:
        """Give free memory back to the system."""
        if self._trim is not None:
            self._trim(0)
