"""LoadWait: which requests wait for KV loads, and which got blocks and are queued again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched.preemption import by_order
from pypto_serving.sched.queue import RequestHeap, WaitingQueue
from pypto_serving.sched.request import Request, Status
from pypto_serving.types.tier import TransferDone

MAX_LOADING = 32
"""Most requests that wait for KV loads at once. Another one whose load pays is put off."""
STALLED_S = 1.0
"""Once no load has ended for so long, requests no longer wait for their turn to load, but compute."""


class LoadWait:
    """Requests whose blocks come from a lower tier. A part of the Scheduler, with which it shares the queue.

    waiting    its transfers have not ended (WAITING_FOR_KV); it is not in the queue
    put off    its loads can begin once others have ended; it is not in the queue, so that those behind it go on
    loaded     its blocks have arrived; it is in the queue again and holds them
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager) -> None:
        self._queue = queue
        self._kv = kv
        self._waiting: dict[str, Request] = {}
        self._put_off = RequestHeap(by_order)
        self._loaded: dict[str, None] = {}
        self._has_room = False
        self._ended_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait for loads."""
        return len(self._waiting) >= MAX_LOADING

    @property
    def is_busy(self) -> bool:
        """Whether any request waits for loads."""
        return bool(self._waiting)

    def wait(self, request: Request, now_s: float) -> None:
        """Move a request out of the queue while its blocks are loaded, so that others can start."""
        if not self._waiting:
            self._ended_s = now_s
        self._queue.remove(request)
        request.status = Status.WAITING_FOR_KV
        request.load_since_s = now_s
        self._waiting[request.id] = request

    def put_off(self, request: Request, now_s: float) -> bool:
        """Move a request out of the queue until other loads have ended. Return False if that may take long."""
        if now_s - self._ended_s >= STALLED_S:
            return False
        self._queue.remove(request)
        self._put_off.push(request)
        return True

    def transferred(self, done: Iterable[TransferDone], now_s: float) -> None:
        """Record transfers that ended and queue the requests that waited for them."""
        for transfer in done:
            self._stop_waiting(self._kv.transferred(transfer, now_s), now_s)

    def update(self, now_s: float) -> None:
        """Queue the requests whose transfers take too long, which compute, and those whose turn may have come.

        These are as many of those put off as may wait for loads, once after a load has ended; or all if loads stall.
        """
        self._stop_waiting(self._kv.expire_fills(now_s), now_s)
        if now_s - self._ended_s >= STALLED_S:
            self._bring_back(len(self._put_off))
        elif self._has_room or not self._waiting:
            self._bring_back(MAX_LOADING - len(self._waiting))
        self._has_room = False

    def _bring_back(self, at_most: int) -> None:
        """Queue the first of the requests that were put off."""
        while at_most > 0 and (request := self._put_off.first()) is not None:
            self._put_off.remove(request)
            self._queue.push(request)
            at_most -= 1

    def _stop_waiting(self, request_ids: Iterable[str], now_s: float) -> None:
        """Queue requests whose loads have ended or were given up. Ignore those that do not wait."""
        for request_id in request_ids:
            self._ended_s = now_s
            request = self._waiting.pop(request_id, None)
            if request is not None:
                self._has_room = True
                request.loaded(now_s)
                request.status = Status.WAITING
                self._queue.push(request)
                if self._kv.holds_fill(request_id):
                    self._loaded[request_id] = None

    def release_one(self, beneficiary: Request) -> bool:
        """Free the blocks loaded for the last other request in the queue that has some. Return False if none has."""
        last = next((request_id for request_id in reversed(self._loaded) if request_id != beneficiary.id), None)
        if last is not None:
            del self._loaded[last]
            self._kv.release(last)
        return last is not None

    def forget(self, request: Request) -> None:
        """Remove a request that started or ended."""
        self._has_room |= self._waiting.pop(request.id, None) is not None
        self._put_off.remove(request)
        self._loaded.pop(request.id, None)

    def clear(self) -> list[Request]:
        """Remove and return all requests that are not in the queue."""
        requests = list(self)
        self._loaded.clear()
        for request in requests:
            self.forget(request)
        return requests

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of requests that are put off, wait, and are loaded."""
        return len(self._put_off), len(self._waiting), len(self._loaded)

    def __len__(self) -> int:
        """Return how many requests wait or are put off."""
        return len(self._waiting) + len(self._put_off)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that wait or are put off."""
        return chain(self._waiting.values(), self._put_off)
