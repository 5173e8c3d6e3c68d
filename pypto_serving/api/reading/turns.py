"""Say whose body a reader reads next."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from operator import itemgetter

from pypto_serving.errors import QueueFullError

RETRY_S = 5
OLDEST_EVERY = 4
"""One turn in so many goes to the body that came first, so that shorter ones cannot hold it up for good."""


class Turns:
    """Hand out turns, most to the shortest body, so that long ones delay none but their like. Owned by ReaderProcess.

    If more than `max_waiting` wait, the longest is refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._num_turns = 0

    async def take(self, num_bytes: int) -> None:
        """Wait for a turn; call `end` after it. Raises QueueFullError. A call that is cancelled has no turn."""
        if not self.taken:
            self.taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (num_bytes, next(self._arrivals), turn)
        insort(self._waiting, entry)
        if len(self._waiting) > self._max_waiting:
            message = f"{self._max_waiting} bodies that are not longer wait to be read; try again later, or send less"
            self._waiting.pop()[2].set_exception(QueueFullError(message, RETRY_S))
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not turn.cancelled() and turn.exception() is None:
                self.end()
            raise

    def end(self) -> None:
        """End a turn; the next one begins."""
        while self._waiting:
            self._num_turns += 1
            oldest = self._num_turns % OLDEST_EVERY == 0
            entry = min(self._waiting, key=itemgetter(1)) if oldest else self._waiting[0]
            self._waiting.remove(entry)
            turn = entry[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.taken = False
