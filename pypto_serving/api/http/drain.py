"""Admit requests and count them, so that a shutdown can drain them."""

from __future__ import annotations

import asyncio

from pypto_serving.errors import UnavailableError

SHUTTING_DOWN = "the server is shutting down and takes no new requests; send it elsewhere"


class Admission:
    """Count requests from admission to their last byte. Owned by Service; used in its event loop only."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    def require_open(self) -> None:
        """Raise UnavailableError while draining."""
        if self.draining:
            raise UnavailableError(SHUTTING_DOWN)

    def enter(self) -> None:
        """Admit a request. Raises UnavailableError while draining."""
        self.require_open()
        self.in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count an admitted request as done."""
        self.in_flight -= 1
        if self.in_flight == 0:
            self._idle.set()

    def drain(self) -> None:
        """Admit no more requests from now on."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Return when no admitted request is left."""
        await self._idle.wait()
