"""Notice that a client disconnected, in streams and in whole responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive

T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects first, cancel `work` and raise ClientDisconnect.

    Call it after the request's body was read: `receive` then waits for the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        for waiting in (task, watcher):
            waiting.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def nobody_listens() -> Response:
    """Make the response for a client that is gone; only logs and metrics see its status."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
