"""Say whose task a reader does next."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from pypto_serving.errors import QueueFullError

RETRY_S = 5
OLDEST_EVERY = 4
"""One turn in so many goes to the task that came first, so that others cannot hold it up for good."""
K = TypeVar("K")
T = TypeVar("T")


class Turns(Generic[K]):
    """Hand out turns, most to the task whose key ranks lowest. Owned by whoever has a reader.

    If more than `max_waiting` wait, the one that ranks highest is refused.
    """

    def __init__(self, max_waiting: int, rank: Callable[[K], Any], what: str) -> None:
        """`rank` is asked anew for each turn. `what` says in an error what else waits."""
        self._max_waiting = max_waiting
        self._rank = rank
        self._what = what
        self.taken = False
        self._waiting: list[tuple[K, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()
        self._num_turns = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the result of `work`, which is called at its turn. Raises QueueFullError.

        A call that is cancelled before its turn costs nothing; work that has begun goes on to its end.
        """
        await self.take(key)
        working = asyncio.ensure_future(work())
        working.add_done_callback(self._done)
        return await asyncio.shield(working)

    async def take(self, key: K) -> None:
        """Wait for a turn; call `end` after it. Raises QueueFullError. A call that is cancelled has no turn."""
        if not self.taken:
            self.taken = True
            return
        turn = asyncio.get_running_loop().create_future()
        entry = (key, next(self._arrivals), turn)
        self._waiting.append(entry)
        if len(self._waiting) > self._max_waiting:
            last = max(self._waiting, key=self._place)
            self._waiting.remove(last)
            message = f"{self._max_waiting} {self._what}; try again later"
            last[2].set_exception(QueueFullError(message, RETRY_S))
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
            entry = self._waiting[0] if oldest else min(self._waiting, key=self._place)
            self._waiting.remove(entry)
            turn = entry[2]
            if not turn.done():
                turn.set_result(None)
                return
        self.taken = False

    def _place(self, entry: tuple[K, int, asyncio.Future[None]]) -> tuple[Any, int]:
        return self._rank(entry[0]), entry[1]

    def _done(self, working: asyncio.Future[Any]) -> None:
        self.end()
        if not working.cancelled():
            working.exception()  # the caller may be gone
