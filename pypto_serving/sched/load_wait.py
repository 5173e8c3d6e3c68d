"""LoadWait: requests that wait for KV loads, or for their turn to load."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched.queue import RequestHeap, WaitingQueue
from pypto_serving.sched.request import Request, Status, by_order
from pypto_serving.types.tier import TransferDone

MAX_LOADING = 32
"""Limit of requests that wait for KV loads at once. Further requests whose load pays are put off."""
STALLED_S = 1.0
"""If no load has ended for this time, requests compute instead of waiting for their turn to load."""


class LoadWait:
    """Requests whose blocks come from a lower tier. A part of the Scheduler, with which it shares requests and queue.

    loading    its transfers have not ended (WAITING_FOR_KV); it is not in the queue. The KV manager owns these waits.
    put off    its loads can begin when others have ended; it is not in the queue, so it does not block later requests
    loaded     its blocks have arrived; it is in the queue again and holds them
    """

    def __init__(self, requests: Mapping[str, Request], queue: WaitingQueue, kv: KVCacheManager) -> None:
        self._requests = requests
        self._queue = queue
        self._kv = kv
        self._loading = kv.tiers.promotions.waits
        self._put_off = RequestHeap(by_order)
        self._loaded: dict[str, None] = {}
        self._has_room = False
        self._ended_s = 0.0

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait for loads."""
        return len(self._loading) >= MAX_LOADING

    @property
    def is_busy(self) -> bool:
        """Whether any request waits for loads."""
        return bool(self._loading)

    def begin(self, request: Request, now_s: float) -> None:
        """Move a request whose load has begun out of the queue, so that others can start."""
        if len(self._loading) == 1:
            self._ended_s = now_s
        self._queue.remove(request)
        request.status = Status.WAITING_FOR_KV
        request.load_since_s = now_s

    def put_off(self, request: Request, now_s: float) -> bool:
        """Move a request out of the queue until other loads have ended. Return False if that may take long."""
        if now_s - self._ended_s >= STALLED_S:
            return False
        self._queue.remove(request)
        self._put_off.push(request)
        return True

    def transferred(self, done: Iterable[TransferDone], now_s: float) -> None:
        """Record ended transfers, and queue the requests that waited for them."""
        for transfer in done:
            self._queue_again(self._kv.transferred(transfer, now_s), now_s)

    def update(self, now_s: float) -> None:
        """Queue requests whose transfers are overdue, so that they compute, and put-off requests that may load now.

        After a load has ended, put-off requests may try until MAX_LOADING are loading; if loads stall, all may.
        """
        self._queue_again(self._kv.expire_fills(now_s), now_s)
        if now_s - self._ended_s >= STALLED_S:
            self._bring_back(len(self._put_off))
        elif self._has_room or not self._loading:
            self._bring_back(MAX_LOADING - len(self._loading))
        self._has_room = False

    def _bring_back(self, count: int) -> None:
        """Queue the first `count` put-off requests."""
        while count > 0 and (request := self._put_off.first()) is not None:
            self._put_off.remove(request)
            self._queue.push(request)
            count -= 1

    def _queue_again(self, request_ids: Iterable[str], now_s: float) -> None:
        """Queue requests whose loads have ended or were given up."""
        for request_id in request_ids:
            self._ended_s = now_s
            self._has_room = True
            request = self._requests[request_id]
            request.loaded(now_s)
            request.status = Status.WAITING
            self._queue.push(request)
            if self._kv.holds_fill(request_id):
                self._loaded[request_id] = None

    def release_one(self, beneficiary: Request) -> bool:
        """Free the loaded blocks of the last other request in the queue that has some. Return False if none has."""
        last = next((request_id for request_id in reversed(self._loaded) if request_id != beneficiary.id), None)
        if last is not None:
            del self._loaded[last]
            self._kv.release(last)
        return last is not None

    def forget(self, request: Request) -> None:
        """Remove a request that started or ends. The caller releases its blocks."""
        self._has_room |= request.status is Status.WAITING_FOR_KV
        self._put_off.remove(request)
        self._loaded.pop(request.id, None)

    def clear(self) -> list[Request]:
        """Remove and return all requests that are not in the queue, because the worker is gone."""
        requests = list(self)
        self._loaded.clear()
        for request in requests:
            self.forget(request)
            self._kv.release(request.id)
        return requests

    @property
    def counts(self) -> tuple[int, int, int]:
        """Return the numbers of requests that are put off, loading, and loaded."""
        return len(self._put_off), len(self._loading), len(self._loaded)

    def __len__(self) -> int:
        """Return how many requests are loading or put off."""
        return len(self._loading) + len(self._put_off)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that are loading or put off."""
        return chain(map(self._requests.__getitem__, self._loading), self._put_off)
