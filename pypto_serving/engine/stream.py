"""OutputStream: what one HTTP request, or one offline call, receives from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pypto_serving.types.request import RequestOutput


class OutputStream:
    """Async iterator over the outputs of some requests, everything that waits at once.

    Ends after the last output of every request. Closing it, or cancelling the task that waits on it, aborts what
    is unfinished.
    """

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._unfinished = set(request_ids)
        self._abort = abort
        self._arrived: list[RequestOutput] = []
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> None:
        """Called by the engine for each output, in order."""
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        self._arrived.append(output)
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def forget(self, request_id: str) -> None:
        """Expect no more of a request that was aborted."""
        self._unfinished.discard(request_id)
        self._wake()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> list[RequestOutput]:
        while not self._arrived:
            if not self._unfinished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
        arrived, self._arrived = self._arrived, []
        return arrived

    async def aclose(self) -> None:
        """Abort what is unfinished; the iteration ends."""
        unfinished, self._unfinished = sorted(self._unfinished), set()
        if unfinished:
            self._abort(unfinished)
        self._wake()
