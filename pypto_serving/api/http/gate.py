"""Limit the number of connections and the memory of unfinished requests, over all clients."""

from __future__ import annotations

import logging
import math
import resource
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from pypto_serving.logs import with_fields
from pypto_serving.util import Clock, counted

MAX_FILES = 16384
"""Plan for at most this many open files, even if the system allows more."""
FILES_FOR_OTHERS, SPARE_PLACES = 128, 64
"""Open files reserved for other uses, and for surplus connections."""
MIN_HELD_BYTES = 64 << 20
SMALL_BYTES, SMALL_ROOM_BYTES = 64 << 10, 64 << 20
"""A connection that holds at most SMALL_BYTES is small; only small ones may use the extra SMALL_ROOM_BYTES."""
SILENCE_S, SIGN_BYTES = 1.0, 16 << 10
"""A client that sends less than SIGN_BYTES of a body in SILENCE_S is silent; a new connection may take its place."""
NO_PLACE = "too many connections are open; try again later"
NO_MEMORY = "too many unfinished requests are held; try again later"
logger = logging.getLogger("pypto_serving.api")
QUIET_S = 10.0


class ConnectionPlaces(NamedTuple):
    """Numbers of served connections, and of spare ones, which are only refused or answered for /health."""

    connections: int
    spare: int


def places(file_limit: int) -> ConnectionPlaces:
    """Return how many connections fit under `file_limit`, the process's soft limit of open files."""
    files = MAX_FILES if file_limit == resource.RLIM_INFINITY else min(MAX_FILES, file_limit)
    left = files - min(FILES_FOR_OTHERS, files // 2)
    spare = min(SPARE_PLACES, left // 4)
    return ConnectionPlaces(left - spare, spare)


class _Sign(NamedTuple):
    """Time of a client's last progress in sending a request, and the bytes of the body received by then."""

    at_s: float
    body_bytes: int


class Waiting(Protocol):
    """A connection, as the gate sees it."""

    def close_idle(self) -> None:
        """Close the connection; no request is in progress on it."""

    def refuse_busy(self, reason: str) -> None:
        """Answer the unfinished request with a 503, and end the connection."""


class Gate:
    """Owns the places of all connections and counts the bytes that they hold. Used in one event loop only.

    A connection is idle, or its client is sending a request, or it is busy: the server is answering.

    - No place is free: close the connection that was idle longest, or else the client that stopped sending first; only
      after SILENCE_S.
    - Memory is short: refuse the unfinished request of the connection that holds most, if more than SMALL_BYTES. Small
      ones have SMALL_ROOM_BYTES of their own; beyond that, refuse the client that was silent longest.
    """

    def __init__(
        self, places: ConnectionPlaces, max_body_bytes: int, clock: Clock, refused: Callable[[int, str], None]
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_held_bytes = max(MIN_HELD_BYTES, 2 * max_body_bytes)
        self.refused = refused
        self._places = places
        self._clock = clock
        self._served: set[Waiting] = set()
        self._surplus: OrderedDict[Waiting, None] = OrderedDict()
        self._idle: OrderedDict[Waiting, float] = OrderedDict()
        self._sending: OrderedDict[Waiting, _Sign] = OrderedDict()
        self._held: dict[Waiting, int] = {}
        self._large: set[Waiting] = set()
        self._num_held = 0

    # Places.

    def enter(self, connection: Waiting) -> bool:
        """Give a new connection a place. Return False if none is free: it may then only ask for /health."""
        if len(self._served) < self._places.connections or self._make_place():
            self._served.add(connection)
            self.idle(connection)
            return True
        self._surplus[connection] = None
        if len(self._surplus) > self._places.spare:
            self._surplus.popitem(last=False)[0].refuse_busy(NO_PLACE)
        return False

    def leave(self, connection: Waiting) -> None:
        """Free the place and the memory of a connection that ended."""
        self.busy(connection)
        self._served.discard(connection)
        self._surplus.pop(connection, None)
        self._large.discard(connection)
        self._num_held -= self._held.pop(connection, 0)

    def idle(self, connection: Waiting) -> None:
        """Record that no request is in progress."""
        self._sending.pop(connection, None)
        if connection in self._served:
            self._idle.setdefault(connection, self._clock())

    def sending(self, connection: Waiting, body_bytes: int) -> None:
        """Record that the client sent a part of a request, of whose body `body_bytes` have arrived so far.

        Only a new request and SIGN_BYTES more of a body count as progress; more of a head, or a trickle, does not.
        """
        self._idle.pop(connection, None)
        if connection not in self._served:
            return
        last = self._sending.get(connection)
        if last is None or body_bytes >= last.body_bytes + SIGN_BYTES:
            self._sending[connection] = _Sign(self._clock(), body_bytes)
            self._sending.move_to_end(connection)

    def busy(self, connection: Waiting) -> None:
        """Record that the connection is not waiting for its client."""
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)

    def _make_place(self) -> bool:
        """Close a connection that has waited SILENCE_S for its client, idle ones first. Return False if none has."""
        latest_s = self._clock() - SILENCE_S
        if self._idle and next(iter(self._idle.values())) <= latest_s:
            connection, _ = self._idle.popitem(last=False)
            end = connection.close_idle
        elif self._sending and next(iter(self._sending.values())).at_s <= latest_s:
            connection, _ = self._sending.popitem(last=False)
            end = partial(connection.refuse_busy, NO_PLACE)
        else:
            return False
        self._served.discard(connection)
        end()
        return True

    # Memory.

    def hold(self, connection: Waiting, num_bytes: int, complete: bool) -> bool:
        """Count more bytes of a connection's newest request. Return False if the request must be refused.

        A `complete` request is never refused later; its bytes count until `release`.
        """
        if connection in self._surplus:
            return True  # surplus connections are few, and are refused after the head
        held = self._held[connection] = self._held.get(connection, 0) + num_bytes
        self._num_held += num_bytes
        if held > SMALL_BYTES:
            self._large.add(connection)
        while (refused := self._too_many(connection)) is not None:
            self._large.discard(refused)
            if refused is connection:
                return False
            self.busy(refused)
            refused.refuse_busy(NO_MEMORY)
        if complete:
            self._large.discard(connection)
        return True

    def release(self, connection: Waiting, num_bytes: int) -> None:
        """Record that `num_bytes` are no longer in memory."""
        if connection in self._held:
            self._held[connection] -= num_bytes
            self._num_held -= num_bytes
            if self._held[connection] <= SMALL_BYTES:
                self._large.discard(connection)

    def _too_many(self, newest: Waiting) -> Waiting | None:
        """Return the connection whose request must be refused for lack of memory, or None."""
        if self._num_held <= self.max_held_bytes:
            return None
        if self._large:
            return max(self._large, key=self._held.__getitem__)
        if self._num_held <= self.max_held_bytes + SMALL_ROOM_BYTES:
            return None
        return next(iter(self._sending), newest)


class RefusalLog:
    """Logs at most one line per reason in QUIET_S, with the number of refusals since the last line.

    There are few reasons, since none contains a client's text.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, int]] = {}
        """For each reason: time of its last log line, and number of refusals since then."""

    def note(self, status: int, reason: str) -> None:
        """Log a refusal, or count it for the next line."""
        told_s, count = self._told.get(reason, (-math.inf, 0))
        count += 1
        if self._clock() - told_s < QUIET_S:
            self._told[reason] = told_s, count
            return
        self._told[reason] = self._clock(), 0
        fields = with_fields(status=status, refused=count)
        line = (counted(count, "request"), status, reason, QUIET_S)
        logger.warning("refused %s with a %d: %s (said at most every %g s)", *line, extra=fields)
