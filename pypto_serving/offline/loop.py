"""Run an event loop in a thread, for callers that are not asynchronous."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from queue import SimpleQueue
from typing import Any, TypeVar

from pypto_serving.errors import EngineDeadError

T = TypeVar("T")
Put = Callable[[T], None]


class LoopThread:
    """Own an event loop and the thread that runs it. Started when made."""

    def __init__(self, name: str) -> None:
        self.stopped = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in the loop and return its result; an interrupt cancels it.

        Raises what `work` raises, and EngineDeadError after `stop`.
        """
        self._require_running()
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, work: Callable[[Put[T]], Coroutine[Any, Any, None]]) -> Iterator[T]:
        """Run `work` in the loop and yield what it puts; closing the iterator cancels it.

        Raises what `work` raises, and EngineDeadError after `stop`.
        """
        self._require_running()
        items: SimpleQueue[tuple[T] | BaseException | None] = SimpleQueue()

        async def pump() -> None:
            try:
                await work(lambda item: items.put((item,)))
                items.put(None)
            except BaseException as error:
                items.put(error)
                raise

        task = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := items.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item[0]
        finally:
            task.cancel()

    def stop(self) -> None:
        """End the loop and its thread."""
        self.stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _require_running(self) -> None:
        if self.stopped:
            raise EngineDeadError("this LLM was shut down; make a new one")
