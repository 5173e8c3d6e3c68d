"""Call the endpoints of an application in this process, past connections, keys and other middleware."""

from __future__ import annotations

import asyncio
import copy
import uuid
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Message, Scope

from pypto_serving.api.http.middleware import SERVER_SEND, VERSION, FaultHandler, Traced
from pypto_serving.logs import REQUEST_ID

NOT_FOR_BATCHES = (f"{VERSION}/files", f"{VERSION}/batches")


class DirectAnswer(NamedTuple):
    """The answer to a request. `request_id` names it in the log."""

    status: int
    request_id: str
    body: bytes


class Direct:
    """Call endpoints. They read bodies, admit, trace and answer requests as they do for clients.

    `paths` are those that requests of a batch may ask for.
    """

    def __init__(self, app: Starlette) -> None:
        bare = copy.copy(app)
        tracing = app.state.service.tracing
        bare.user_middleware = [Middleware(FaultHandler)]
        if tracing is not None:
            bare.user_middleware.insert(0, Middleware(Traced, tracing=tracing))
        self._app = app
        self.paths = {
            route.path
            for route in app.routes
            if isinstance(route, Route) and "POST" in (route.methods or ()) and route.path.startswith(VERSION + "/")
            if not route.path.startswith(NOT_FOR_BATCHES) and not route.param_convertors
        }
        self._handle = bare.build_middleware_stack()

    async def post(self, path: str, body: bytes | memoryview, left: asyncio.Event, owner: bytes = b"") -> DirectAnswer:
        """Return the answer to a request of `owner`, which stands for a key that the application does not check.

        Once `left` is set, the request ends like one whose client left.
        """
        request_id = uuid.uuid4().hex
        unread, status, written = [body], 0, bytearray()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                written.extend(message.get("body", b""))

        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"x-api-key", owner)],
            "app": self._app,
            "state": {"request_id": request_id, "trace": None},
            SERVER_SEND: send,
        }
        named = REQUEST_ID.set(request_id)
        try:
            await self._handle(scope, receive, send)
        finally:
            REQUEST_ID.reset(named)
        return DirectAnswer(status, request_id, bytes(written))
