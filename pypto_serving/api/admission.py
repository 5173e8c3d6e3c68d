"""Which requests are in the server, and whether it takes new ones."""

from __future__ import annotations

import asyncio

from pypto_serving.errors import UnavailableError


class Admission:
    """Counts requests between admission and their last byte. Owned by the server, used in its event loop only."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Take a request in; raises UnavailableError while draining."""
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests; send it elsewhere")
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request that entered is done."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def drain(self) -> None:
        """Take no more requests, for good."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Return as soon as no request is in the server."""
        await self._idle.wait()
