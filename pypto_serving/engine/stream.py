"""OutputStream: what one HTTP request, or one offline call, receives from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pypto_serving.types.request import RequestOutput

Pause = Coroutine[Any, Any, None] | None
"""What a consumer has to await before it takes more."""
Take = Callable[[list[RequestOutput]], Pause]
"""Takes all outputs that wait, in order."""


class OutputStream:
    """The outputs of some requests, on their way from the engine to the one consumer that calls `deliver_to`.

    A consumer that keeps up is called within the engine's reader, without waking a task. What arrives while it does
    not, or before it came, waits here and is taken at once.
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
        """Called by the engine for each output, in order; True where nothing waited, so that `deliver` is due."""
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        self._arrived.append(output)
        return len(self._arrived) == 1

    def deliver(self) -> None:
        """Called by the engine once it pushed what it has; does nothing while the consumer is busy."""
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return  # deliver_to looks for itself
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
        """Hand everything to `take`; returns after the last output of every request, raises what `take` raises.

        What is unfinished then, or when this is cancelled, is aborted.
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
        """Expect no more of a request that was aborted."""
        self._unfinished.discard(request_id)
        waiter = self._waiter
        if not self._unfinished and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Abort what is unfinished. May be called more than once."""
        unfinished, self._unfinished = sorted(self._unfinished), set()
        if unfinished:
            self._abort(unfinished)
