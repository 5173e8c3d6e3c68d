"""EngineClient: the interface of an engine for HTTP handlers. OutputStream: the outputs of one submission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import EngineRequest, RequestOutput, StepStats
from pypto_serving.types.tier import Tier

Pause = Coroutine[Any, Any, None] | None
"""An awaitable to finish before the consumer takes more, or None."""
Take = Callable[[list[RequestOutput]], Pause]
"""A consumer: takes all waiting outputs, in order."""


class OutputStream:
    """Owns the undelivered outputs of some requests, for the one consumer that calls `deliver_to`.

    While the consumer keeps up, the engine's reader calls it directly, without waking a task. Outputs that arrive while
    it is busy, or before it exists, wait here and are delivered together. `replicas`: the replica of each request,
    where there are several.
    """

    __slots__ = ("_abort", "_arrived", "_pause", "_take", "_unfinished", "_waiter", "replicas")

    def __init__(self, request_ids: Sequence[str], abort: Callable[[Sequence[str]], None]) -> None:
        self._unfinished = set(request_ids)
        self.replicas: dict[str, int] = {}
        self._abort = abort
        self._arrived: list[RequestOutput] = []
        self._take: Take
        self._pause: Pause = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> bool:
        """Queue an output. Return True if it is the only one, so that the engine must call `deliver`."""
        if output.finish_reason is not None:
            self._unfinished.discard(output.request_id)
        self._arrived.append(output)
        return len(self._arrived) == 1

    def deliver(self) -> None:
        """Pass the queued outputs to the consumer. Do nothing while it is busy."""
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
        """Pass all outputs to `take`, until the last one of every request. Raises the errors of `take`.

        After an error or a cancellation, unfinished requests are aborted.
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


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine makes progress. `age_s` is the age of its last completed step in seconds.

    `status` is one word: ready, loading, draining, stalled, silent or dead; `detail` is one line for the operator.
    """

    ok: bool
    status: str
    detail: str = ""
    age_s: float = 0.0


class Monitored(Protocol):
    """One replica, as seen by metrics."""

    @property
    def stats(self) -> StepStats:
        """The newest snapshot."""

    def health(self) -> Health:
        """Return whether requests make progress; see Health."""


class EngineClient(Protocol):
    """The interface of an engine for HTTP handlers. All methods must be called in the event loop's thread.

    The engine calls `on_stats` with every new snapshot.
    """

    on_stats: Callable[[StepStats], None]

    @property
    def config(self) -> EngineConfig:
        """The configuration that the engine was started with."""

    @property
    def engines(self) -> Sequence[Monitored]:
        """The engine of each replica."""

    def require_admission(self, count: int, num_tokens: int = 0) -> None:
        """Raise QueueFullError or UnavailableError unless `count` requests with `num_tokens` of prompts fit."""

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Admit all of `requests` or none. Raises QueueFullError or UnavailableError.

        The last output of a request has a finish_reason, and a fault if the request failed.
        """

    def give_up_all(self) -> None:
        """End every unfinished request with a 503, before the server ends."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests whose client has disconnected. Ignore unknown and finished ids."""

    def clear_cache(self, tiers: Sequence[Tier]) -> None:
        """Forget the cached blocks of some tiers. Raises UnavailableError while no engine runs."""

    def health(self) -> Health:
        """Return whether requests make progress, not just whether the process exists; see Health."""
