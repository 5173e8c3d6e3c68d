"""What went wrong with a folder: said once each, with waits that double where trying again may help."""

from __future__ import annotations

import errno
import logging
import os
import threading

from pypto_serving.util import Clock

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, a quota or the largest size of a file is used up: room may come back."""

GONE = "its folder was deleted or moved away; a new one is made when the worker or the server starts again"

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 60.0


class Faults:
    """Owner of what is known about a folder's faults. Any thread may say one."""

    def __init__(self, name: str, log: logging.Logger, clock: Clock) -> None:
        self._name, self._log, self._clock = name, log, clock
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._wait_s = 0.0
        self._retry_at_s = 0.0

    def say(self, kind: str, message: str) -> None:
        """Log a line about the folder, unless one of this kind was logged before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        self._log.warning("%s: %s", self._name, message)

    def full(self, error: OSError) -> None:
        """There was no room: let time pass before the next try."""
        self.say("full", f"no room for more blocks: {reason_of(error)}; what is there stays in use")
        self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S) or _FIRST_WAIT_S
        self._retry_at_s = self._clock.now() + self._wait_s

    def may_try(self) -> bool:
        """Whether it is time to ask for room again."""
        return self._clock.now() >= self._retry_at_s

    def found_room(self) -> None:
        """There is room again: the next lack of it is news."""
        if self._wait_s:
            self._wait_s = self._retry_at_s = 0.0
            self._said.discard("full")


def reason_of(error: Exception) -> str:
    """Why a call failed, without numbers and file names."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number).lower() if number else str(error)
