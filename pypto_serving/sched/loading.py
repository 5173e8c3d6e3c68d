"""Loading: which requests wait for KV loads, and which got blocks and are queued again."""

from __future__ import annotations

from collections.abc import Iterator

from pypto_serving.sched.request import Request

MAX_LOADING = 32
"""Most requests that wait for KV loads at once. Another one whose load pays stays in the queue until one has ended."""


class Loading:
    """Requests whose blocks come from a lower tier. Owned and changed by the Scheduler.

    waiting    its transfers have not ended (WAITING_FOR_KV)
    loaded     its blocks have arrived; it is in the queue again and holds them
    put off    it is in the queue, and its loads can begin once others have ended
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Request] = {}
        self._loaded: dict[str, None] = {}
        self.put_off_id = ""

    @property
    def is_full(self) -> bool:
        """Whether no further request may wait for loads."""
        return len(self._waiting) >= MAX_LOADING

    def wait(self, request: Request) -> None:
        """Add a request whose loads begin."""
        self._waiting[request.id] = request

    def stop_waiting(self, request_id: str) -> Request | None:
        """Remove and return a waiting request, or return None if it does not wait."""
        self.put_off_id = ""
        return self._waiting.pop(request_id, None)

    def put_off(self, request_id: str) -> None:
        """Record that a queued request need not be tried again before another one stops waiting."""
        self.put_off_id = request_id

    def hold(self, request_id: str) -> None:
        """Record that a queued request holds loaded blocks."""
        self._loaded[request_id] = None

    def take_loaded(self, beneficiary: str) -> str | None:
        """Remove and return the id of the last other request that holds loaded blocks, or None."""
        last = next((request_id for request_id in reversed(self._loaded) if request_id != beneficiary), None)
        if last is not None:
            del self._loaded[last]
        return last

    def forget(self, request_id: str) -> None:
        """Remove a request that started or ended."""
        self.stop_waiting(request_id)
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
