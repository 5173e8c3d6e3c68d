"""OutputStream: the outputs of one HTTP request or offline call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pypto_serving.types.request import RequestOutput

Pause = Coroutine[Any, Any, None] | None
"""What a consumer must await before it takes more, or None."""
Take = Callable[[list[RequestOutput]], Pause]
"""A consumer: takes all waiting outputs, in order."""


class OutputStream:
    """Owns the undelivered outputs of some requests, for the one consumer that calls `deliver_to`.

    While the consumer keeps up, the engine's reader calls it directly, without waking a task. Outputs that arrive while
    it is busy, or before it is there, wait here and are delivered together.
    """

    __slots__ = ("_abort", "_arrived", "_pause", "_take", "_unfinished", "_waiter")

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._unfinished = set(request_ids)
        self._abort = abort
        self._arrived: list[RequestOutput] = []
        self._take: Take
        self._pause: Pause = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> bool:
        """Queue an output. Return True if none was waiting, so that the engine must call `deliver`."""
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        self._arrived.append(output)
        return len(self._arrived) == 1

    def deliver(self) -> None:
        """Hand the queued outputs to the consumer. Do nothing while it is busy."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return  # deliver_to checks for new outputs itself
        arrived, self._arrived = self._arrived, []
        try:
            pause = self._take(arrived)
        except Exception as error:
            waiter.set_exception(error)
            return
        if pause is None and self._unfinished:
            self._waiter = waiter
        else:
            self._pause = pause
            waiter.set_result(None)

    async def deliver_to(self, take: Take) -> None:
        """Hand all outputs to `take`, until the last one of every request. Raises what `take` raises.

        Requests that are unfinished at the end, or when this is cancelled, are aborted.
        """
        self._take = take
        try:
            while self._arrived or self._unfinished:
                if self._arrived:
                    arrived, self._arrived = self._arrived, []
                    self._pause = take(arrived)
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                if self._pause is not None:
                    pause, self._pause = self._pause, None
                    await pause
        finally:
            del self._take
            if self._pause is not None:
                self._pause.close()
            self.close()

    def forget(self, request_id: str) -> None:
        """Expect no further output of an aborted request."""
        self._unfinished.discard(request_id)
        waiter = self._waiter
        if not self._unfinished and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Abort unfinished requests. May be called more than once."""
        unfinished, self._unfinished = sorted(self._unfinished), set()
        if unfinished:
            self._abort(unfinished)
