"""StoreFaults: logs each kind of fault of a folder once, and doubles the wait before the next try."""

from __future__ import annotations

import errno
import logging
import threading

from pypto_serving.util import Backoff, Clock

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The disk, a quota or the file size limit is used up. Room may come back."""

GONE = "its folder was deleted or moved away; a new one is made when the worker or the server starts again"


class StoreFaults:
    """Owns what is known about a store's faults. Any thread may report one.

    `reason` says why nothing more is stored; it is empty while blocks can be stored.
    """

    def __init__(self, name: str, log: logging.Logger, clock: Clock) -> None:
        self._name, self._log, self._clock = name, log, clock
        self._said: set[str] = set()
        self._lock = threading.Lock()
        self._backoff = Backoff()
        self._is_full = False
        self.reason = ""

    def say(self, kind: str, message: str) -> None:
        """Log a fault, unless one of its kind was logged before."""
        with self._lock:
            if kind in self._said:
                return
            self._said.add(kind)
        self._log.warning("%s: %s", self._name, message)

    def stop_storing(self, reason: str) -> None:
        """Store nothing more, and log why."""
        self.reason = reason
        self.say("reader", f"blocks are not added: {reason}")

    def folder_gone(self) -> None:
        """Store nothing more, because the folder was deleted or moved. What is open can still be loaded."""
        self.reason = GONE
        self.say("gone", f"blocks are not added any more: {GONE}")

    def full(self, error: OSError) -> None:
        """Log that there is no room, and wait before the next try."""
        self.say("full", f"no room for more blocks: {reason_of(error)}; what is there stays in use")
        self._is_full = True
        self._backoff.fail(self._clock())

    def may_try(self) -> bool:
        """Return whether it is time to try again."""
        return self._backoff.is_over(self._clock())

    def found_room(self) -> None:
        """Note that there is room again: the next lack of it is logged."""
        if self._is_full:
            self._is_full = False
            self._backoff = Backoff()
            self._said.discard("full")


def reason_of(error: Exception) -> str:
    """Return why a call failed, without error numbers and file names."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)
