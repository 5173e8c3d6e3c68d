"""StoreFaults: logs each kind of fault of a folder once, and doubles the wait before the next try."""

from __future__ import annotations

import errno
import logging
import threading

from pypto_serving.util import Clock

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, a quota or the file size limit is used up. Room may come back."""

GONE = "its folder was deleted or moved away; a new one is made when the worker or the server starts again"

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class StoreFaults:
    """Owns what is known about a folder's faults. Any thread may report one."""

    def __init__(self, name: str, log: logging.Logger, clock: Clock) -> None:
        self._name, self._log, self._clock = name, log, clock
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._wait_s = 0.0
        self._retry_at_s = 0.0

    def say(self, kind: str, message: str) -> None:
        """Log a fault of the folder, unless one of its kind was logged before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        self._log.warning("%s: %s", self._name, message)

    def full(self, error: OSError) -> None:
        """Log that there is no room, and wait before the next try."""
        self.say("full", f"no room for more blocks: {reason_of(error)}; what is there stays in use")
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) or _FIRST_WAIT_S
        self._retry_at_s = self._clock() + self._wait_s

    def may_try(self) -> bool:
        """Return whether it is time to try again."""
        return self._clock() >= self._retry_at_s

    def found_room(self) -> None:
        """Note that there is room again: the next lack of it is logged."""
        if self._wait_s:
            self._wait_s = self._retry_at_s = 0.0
            self._said.discard("full")


def reason_of(error: Exception) -> str:
    """Return why a call failed, without error numbers and file names."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)
