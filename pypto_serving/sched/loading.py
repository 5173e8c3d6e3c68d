"""Loading: which requests wait for KV loads, and which got blocks and are queued again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched.queue import WaitingQueue
from pypto_serving.sched.request import Request, Status
from pypto_serving.types.tier import TransferDone

MAX_LOADING = 32
"""Most requests that wait for KV loads at once. Another one whose load pays stays in the queue until one has ended."""


class Loading:
    """Requests whose blocks come from a lower tier. A part of the Scheduler, which owns them and the queue.

    waiting    its transfers have not ended (WAITING_FOR_KV)
    loaded     its blocks have arrived; it is in the queue again and holds them
    put off    it is in the queue, and its loads can begin once others have ended
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager) -> None:
        self._queue = queue
        self._kv = kv
        self._waiting: dict[str, Request] = {}
        self._loaded: dict[str, None] = {}
        self.put_off_id = ""

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait for loads."""
        return len(self._waiting) >= MAX_LOADING

    def wait(self, request: Request) -> None:
        """Move a request out of the queue while its blocks are loaded, so that others can start."""
        self._queue.remove(request)
        request.status = Status.WAITING_FOR_KV
        self._waiting[request.id] = request

    def put_off(self, request_id: str) -> None:
        """Record that a queued request need not be tried again before another one stops waiting."""
        self.put_off_id = request_id

    def transferred(self, done: Iterable[TransferDone], now_s: float) -> None:
        """Record transfers that ended and queue the requests that waited for them."""
        for transfer in done:
            self._stop_waiting(self._kv.transferred(transfer, now_s))

    def expire(self, now_s: float) -> None:
        """Queue the requests whose transfers take too long; they compute."""
        self._stop_waiting(self._kv.expire_fills(now_s))

    def _stop_waiting(self, request_ids: Iterable[str]) -> None:
        """Queue requests whose loads have ended or were given up. Ignore those that do not wait."""
        for request_id in request_ids:
            self.put_off_id = ""
            request = self._waiting.pop(request_id, None)
            if request is not None:
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

    def forget(self, request_id: str) -> None:
        """Remove a request that started or ended."""
        self.put_off_id = ""
        self._waiting.pop(request_id, None)
        self._loaded.pop(request_id, None)

    def clear(self) -> None:
        """Remove all requests."""
        self._waiting.clear()
        self._loaded.clear()
        self.put_off_id = ""

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over requests that wait."""
        return iter(self._waiting.values())
