"""An event loop in a thread, for callers that have none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pypto_serving.errors import EngineDeadError
from pypto_serving.threads import start_thread

T = TypeVar("T")
Put = Callable[[T], None]
ENDED = "this LLM was shut down; make a new one"


class LoopThread:
    """Owns an event loop and the thread that runs it, from the moment it is made to `stop`.

    Calls that wait when it stops raise EngineDeadError. So do all calls in a copy of the process (fork), which has no
    such thread; there nothing else may be touched, since the loop's files are those of the original.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._stopped = False
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread(name, self._loop.run_forever, lambda error: self._end_calls())

    @property
    def is_copied(self) -> bool:
        """Return whether this process is a copy of the one with the thread."""
        return os.getpid() != self._pid

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` in the loop and return its result; an interrupt cancels it.

        Raises what `work` raises, and EngineDeadError.
        """
        future = self._submit(work)
        try:
            return self._result(future)
        except BaseException:
            future.cancel()
            raise

    def iterate(self, work: Callable[[Put[T]], Coroutine[Any, Any, None]]) -> Iterator[T]:
        """Run `work` in the loop and yield what it puts; closing the iterator cancels it. Raises as `call` does."""
        items: SimpleQueue[tuple[T] | None] = SimpleQueue()
        future = self._submit(lambda: work(lambda item: items.put((item,))))
        future.add_done_callback(lambda _: items.put(None))
        try:
            while (item := items.get()) is not None:
                yield item[0]
                self._check_process()
            self._result(future)
        finally:
            if not self.is_copied:
                future.cancel()

    def _submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        self._check_process()
        with self._lock:
            if self._stopped:
                raise EngineDeadError(ENDED)
            future = asyncio.run_coroutine_threadsafe(work(), self._loop)
            self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        return future

    def _check_process(self) -> None:
        if self.is_copied:
            raise EngineDeadError(
                f"this LLM works in process {self._pid} only, of which this process is a copy; make an LLM here, or "
                "start processes by spawn"
            )

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise EngineDeadError(ENDED) from None

    def _end_calls(self) -> None:
        """Take no more calls, and end those that wait."""
        with self._lock:
            self._stopped = True
        for future in list(self._calls):
            future.cancel()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """End all calls, do `last`, then end the loop and its thread. Does nothing if it has stopped already."""
        if self._stopped:
            return
        self._end_calls()
        try:
            asyncio.run_coroutine_threadsafe(last(), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
