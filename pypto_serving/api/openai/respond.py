"""Answer with a generation: one JSON object or server-sent events. A disconnect ends the generation."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Generator
from types import coroutine
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pypto_serving.api.disconnect import nobody_listens, until_disconnect
from pypto_serving.api.errors import describe
from pypto_serving.api.generation.choice import Delta
from pypto_serving.api.generation.generation import Generation
from pypto_serving.api.middleware import SERVER_SEND
from pypto_serving.api.openai.sse import EventFormat
from pypto_serving.engine.stream import Pause
from pypto_serving.errors import PyptoError

logger = logging.getLogger("pypto_serving.api")

DONE = b"data: [DONE]\n\n"


async def respond(
    request: Request, generation: Generation, form: EventFormat, stream: bool, headers: dict[str, str]
) -> Response:
    """Make the response of a generation; it closes the generation when it ends."""
    if stream:
        return EventStream(generation, form, headers)
    try:
        outputs = await until_disconnect(request.receive, generation.collect())
        content = msgspec.json.encode(form.response(outputs, generation.usage()))
        return Response(content, 200, headers, "application/json")
    except ClientDisconnect:
        return nobody_listens()
    finally:
        generation.close()


class EventStream(Response):
    """Stream a generation as server-sent events; waiting deltas leave in one write.

    The status line waits for the first output, so a request that fails earlier gets its own status.
    """

    def __init__(self, generation: Generation, form: EventFormat, headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._generation = generation
        self._form = form
        self._extra_headers = headers
        self._started = False
        fixed = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self.init_headers(fixed | headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._run(scope, receive, send))
        except ClientDisconnect:
            if not self._started:
                await nobody_listens()(scope, receive, send)
        finally:
            self._generation.close()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        write: Send = scope[SERVER_SEND]
        event, opening = self._form.event, self._form.opening()

        def pass_on(deltas: list[Delta]) -> Pause:
            body = event(deltas[0]) if len(deltas) == 1 else b"".join(map(event, deltas))
            if not self._started:
                return self._start(send, write, opening + body)
            if not body:
                return None
            return begun(write({"type": "http.response.body", "body": body, "more_body": True}))

        try:
            await self._generation.run(pass_on)
            last = self._form.usage_event(self._generation.usage()) + DONE
        except Exception as error:
            known = isinstance(error, PyptoError)
            if not self._started and known:
                return await describe(error).response(self._extra_headers)(scope, receive, send)
            if not self._started:
                raise
            if not known:
                logger.exception("a stream failed")
            last = b"data: " + describe(error).payload() + b"\n\n"
        await write({"type": "http.response.body", "body": last, "more_body": False})

    async def _start(self, send: Send, write: Send, body: bytes) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await write({"type": "http.response.body", "body": body, "more_body": True})


def begun(work: Awaitable[None]) -> Pause:
    """Run `work` until it waits; return None if it ended, else the rest of it to await.

    A server's `send` waits for slow clients only, so most writes need no task.
    """
    steps = work.__await__()
    try:
        waits_for = next(steps)
    except StopIteration:
        return None
    return _rest(waits_for, steps)


async def _rest(waits_for: object, steps: Generator[Any, Any, None]) -> None:
    try:
        await _resumed(waits_for, steps)
    finally:
        steps.close()


@coroutine
def _resumed(waits_for: object, steps: Generator[Any, Any, None]) -> Generator[Any, Any, None]:
    """Wait in the current task for what `begun` found, then run the rest."""
    yield waits_for
    yield from steps
