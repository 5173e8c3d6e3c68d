"""Say whose body a reader reads next."""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort

from pypto_serving.errors import QueueFullError

RETRY_S = 5


class Turns:
    """Hand out turns, the shortest body first, so that long ones delay none but their like. Owned by ReaderProcess.

    If more than `max_waiting` wait, the longest is refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self.taken = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

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
            turn = self._waiting.pop(0)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.taken = False
