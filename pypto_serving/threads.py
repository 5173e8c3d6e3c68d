"""Threads and tasks that others rely on end loudly; slow work has threads of its own, which hold up no end.

asyncio has one set of threads for all work, which a process waits for at its end; so nothing here uses it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, NoReturn, ParamSpec, TypeVar

from pypto_serving.errors import EXIT_CRASH, PyptoError

P = ParamSpec("P")
T = TypeVar("T")
OnFailure = Callable[[BaseException], object]

logger = logging.getLogger("pypto_serving")
QUICK_THREADS = 64
"""More than there are ever calls at once: each is the end of a process, or the like."""


def end_process(error: BaseException) -> NoReturn:
    """End this process, since others would wait in vain for what `error` ended."""
    if isinstance(error, PyptoError):
        logger.error("%s", error)
    os._exit(exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of a process that an error ends."""
    return error.exit_code if isinstance(error, PyptoError) else EXIT_CRASH


@contextmanager
def ending_loudly(name: str, on_failure: OnFailure = end_process) -> Iterator[None]:
    """Call `on_failure` with the error that ends `name`: it ends this process, or what relies on that work.

    Unexpected errors are logged, with their traces.
    """
    try:
        yield
    except BaseException as error:
        _log(name, error)
        on_failure(error)


def _log(name: str, error: BaseException) -> None:
    if not isinstance(error, PyptoError):
        logger.error("%s ended unexpectedly", name, exc_info=error)


def start_thread(
    name: str, work: Callable[[], object], on_failure: OnFailure = end_process, *, daemon: bool = True
) -> threading.Thread:
    """Start a thread that does `work`; see `ending_loudly`. A daemon does not keep this process from ending."""

    def run() -> None:
        with ending_loudly(name, on_failure):
            work()

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def start_task(name: str, work: Coroutine[Any, Any, T], on_failure: OnFailure) -> asyncio.Task[T]:
    """Start a task in the running loop; see `ending_loudly`. One that is cancelled ends in silence."""

    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log(name, error)
            on_failure(error)

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task


class DaemonThreads(Executor):
    """Owns up to `count` threads, which start when they are needed. A process does not wait for them when it ends."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count = name, count
        self._forget_all()
        os.register_at_fork(after_in_child=self._forget_all)

    def _forget_all(self) -> None:
        """Begin anew; a copy of this process has no threads."""
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_open = 0

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread do `work`, once one is free."""
        future: Future[T] = Future()
        context = contextvars.copy_context()  # log lines name their request
        self._work.put((future, lambda: context.run(work, *args, **kwargs)))
        with self._lock:
            self._num_open += 1
            starts = self._num_threads < min(self._num_open, self._count)
            self._num_threads += starts
        if starts:
            start_thread(self._name, self._run)
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._num_open -= 1
            del future, work  # what they hold may be large


_QUICK = DaemonThreads("quick", QUICK_THREADS)
_SLOW = DaemonThreads("slow", len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


async def in_quick_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, which may block but ends soon, and which no slow work may hold up."""
    return await asyncio.wrap_future(_QUICK.submit(work, *args, **kwargs))


async def in_slow_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of `work`, which takes long: as many at once as there are CPUs. No end waits for it."""
    return await asyncio.wrap_future(_SLOW.submit(work, *args, **kwargs))
