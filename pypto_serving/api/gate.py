"""Share the places of connections and the memory of unfinished requests among all clients."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, Protocol

from pypto_serving.util import Clock

MAX_FILES, FILES_FOR_OTHERS, SPARE_PLACES = 16384, 128, 64
"""Most open files of this process, how many of them are not for connections, and how many are for surplus ones."""
MIN_HELD_BYTES = 64 << 20
SILENCE_S = 1.0
"""A connection whose client was silent for so long gives its place to a newcomer."""


class Places(NamedTuple):
    """How many connections are served, and how many more are read, to be refused or asked for /health."""

    connections: int
    spare: int


def raise_file_limit() -> Places:
    """Raise the soft limit of open files as far as allowed, and return the places that fit under it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    files = wanted if soft == resource.RLIM_INFINITY else min(MAX_FILES, max(soft, wanted))
    left = files - min(FILES_FOR_OTHERS, files // 2)
    spare = min(SPARE_PLACES, left // 4)
    return Places(left - spare, spare)


class Waiting(Protocol):
    """A connection, as the gate sees it."""

    def close_idle(self) -> None:
        """End the connection, on which no request has begun."""

    def refuse_busy(self, reason: str) -> None:
        """Answer with a 503 and end the connection."""


class Gate:
    """Owns the places of all connections and counts the bytes that they hold. Used in one event loop only.

    A connection is idle, or its client is sending a request, or the request is being answered. When a place or memory
    is short, connections that wait for their clients give way. Memory is taken from the client that has been silent
    longest. Places are taken from idle connections, then from silent clients, after SILENCE_S.
    """

    def __init__(self, places: Places, max_body_bytes: int, clock: Clock, refused: Callable[[int, str], None]) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_held_bytes = max(MIN_HELD_BYTES, 2 * max_body_bytes)
        self.refused = refused
        self._places = places
        self._clock = clock
        self._served: set[Waiting] = set()
        self._surplus: OrderedDict[Waiting, None] = OrderedDict()
        self._idle: OrderedDict[Waiting, float] = OrderedDict()
        self._sending: OrderedDict[Waiting, float] = OrderedDict()
        self._held: dict[Waiting, int] = {}
        self._num_held = 0

    def enter(self, connection: Waiting) -> bool:
        """Give a new connection a place. Return False if it is surplus: it may only ask for /health."""
        if len(self._served) < self._places.connections or self._make_place():
            self._served.add(connection)
            self.idle(connection)
            return True
        self._surplus[connection] = None
        if len(self._surplus) > self._places.spare:
            self._surplus.popitem(last=False)[0].refuse_busy(NO_PLACE)
        return False

    def leave(self, connection: Waiting) -> None:
        """Forget a connection that ended."""
        self._served.discard(connection)
        self._surplus.pop(connection, None)
        self.received(connection)
        self.release(connection)

    def idle(self, connection: Waiting) -> None:
        """Note that no request is under way."""
        self.received(connection)
        self.release(connection)
        if connection in self._served:
            self._idle[connection] = self._clock.now()

    def hold(self, connection: Waiting, num_bytes: int) -> None:
        """Note that the client sent something, and that `num_bytes` of its unfinished request are in memory."""
        if connection in self._surplus:
            return  # few, and refused after the head
        self.received(connection)
        self._sending[connection] = self._clock.now()
        self._num_held += num_bytes - self._held.get(connection, 0)
        self._held[connection] = num_bytes
        while self._num_held > self.max_held_bytes and self._sending:
            silent, _ = self._sending.popitem(last=False)
            self.release(silent)
            silent.refuse_busy(NO_MEMORY)

    def received(self, connection: Waiting) -> None:
        """Note that the request is complete: its bytes are held, but the connection does not wait for its client."""
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)

    def release(self, connection: Waiting) -> None:
        """Note that the request's bytes are no longer in memory."""
        self._num_held -= self._held.pop(connection, 0)

    def _make_place(self) -> bool:
        """End a connection that waits for its client, if one has for SILENCE_S."""
        latest_s = self._clock.now() - SILENCE_S
        for waiting in (self._idle, self._sending):
            if not waiting or next(iter(waiting.values())) > latest_s:
                continue
            connection, _ = waiting.popitem(last=False)
            self._served.discard(connection)
            if waiting is self._idle:
                connection.close_idle()
            else:
                connection.refuse_busy(NO_PLACE)
            return True
        return False


NO_PLACE = "too many connections are open; try again later"
NO_MEMORY = "too many unfinished requests are held; try again later"
