"""Answer all requests of a batch file that have no answer yet."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
import uuid
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Message, Scope

from pypto_serving.api.batch.lines import BatchRequest, DirectAnswer, key_of, require_beginning, write
from pypto_serving.api.batch.store import lock
from pypto_serving.api.common.respond import CLIENT_CLOSED_REQUEST
from pypto_serving.api.http.allowance import ALLOWANCE
from pypto_serving.api.http.middleware import VERSION, FaultHandler
from pypto_serving.logs import REQUEST_ID
from pypto_serving.threads import in_slow_thread

BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
"""Status codes after which a request is sent again."""
RETRY_S = 1.0


class _Status(msgspec.Struct):
    status_code: int


class _AnswerLine(msgspec.Struct):
    custom_id: str
    response: _Status


_LINE = msgspec.json.Decoder(_AnswerLine)


class AnswerFile:
    """Owns a file of answers. A killed process leaves whole lines, and perhaps an incomplete last one.

    `answered`: keys of the requests that have an answer; `num_failed`: how many of these answers are errors.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the file, and cut off an incomplete last line.

        Raises OSError, BlockingIOError if another process writes the file, ValueError if it is not a file of answers.
        """
        self.answered: set[bytes] = set()
        self.num_failed = 0
        self._file: BinaryIO = path.open("ab+", buffering=0)
        lock(self._file)
        end = 0
        self._file.seek(0)
        with path.open("rb") as written:
            require_beginning(written.peek()[:1])
            for line in written:
                if not line.endswith(b"\n"):
                    require_beginning(line)
                    break
                self._note(_LINE.decode(line))
                end += len(line)
        self._file.truncate(end)

    def add(self, request: BatchRequest, answer: bytes, status: int) -> None:
        """Append an answer. Once this returns, the answer survives a kill of this process."""
        left = memoryview(answer)
        while left:
            left = left[self._file.write(left) or 0 :]
        self._note(_AnswerLine(request.custom_id, _Status(status)))

    def close(self) -> None:
        self._file.close()

    def _note(self, line: _AnswerLine) -> None:
        self.answered.add(key_of(line.custom_id))
        self.num_failed += line.response.status_code >= HTTPStatus.BAD_REQUEST


class Run:
    """Answers the requests of one file for `client`, `width` at once. Setting `left` ends unanswered requests."""

    def __init__(
        self,
        direct: Direct,
        output: AnswerFile,
        width: int,
        on_answer: Callable[[], None] = lambda: None,
        client: str = "",
    ) -> None:
        self.left = asyncio.Event()
        self._direct = direct
        self._output = output
        self._width = width
        self._on_answer = on_answer
        self._client = client

    async def answer(self, requests: Iterable[BatchRequest]) -> None:
        """Return when all requests have answers, or `left` is set. Retry requests while the server is too busy.

        A thread iterates over the requests, since their lines may be long.
        """
        running: set[asyncio.Task[None]] = set()
        unread = iter(requests)
        try:
            while (request := await in_slow_thread(next, unread, None)) is not None:
                if self.left.is_set():
                    break
                if request.key in self._output.answered:
                    continue
                if len(running) == self._width:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
                running.add(asyncio.create_task(self._answer(request)))
            await asyncio.gather(*running)
        finally:
            self.left.set()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, request: BatchRequest) -> None:
        while not self.left.is_set():
            answer = await self._direct.post(request.url, memoryview(request.body), self.left, self._client)
            if answer.status == CLIENT_CLOSED_REQUEST:
                return
            if answer.status not in BUSY:
                self._output.add(request, write(request, answer), answer.status)
                self._on_answer()
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.left.wait(), RETRY_S)


NOT_FOR_BATCHES = (f"{VERSION}/files", f"{VERSION}/batches")


class Direct:
    """Calls endpoints of the application directly: bodies, admission, traces and answers are as for HTTP clients.

    `paths`: the endpoints that requests of a batch may use.
    """

    def __init__(self, app: Starlette) -> None:
        bare = copy.copy(app)
        bare.user_middleware = [Middleware(FaultHandler)]
        self._tracing = app.state.service.tracing
        self._app = app
        self.paths = {
            route.path
            for route in app.routes
            if isinstance(route, Route) and "POST" in (route.methods or ()) and route.path.startswith(VERSION + "/")
            if not route.path.startswith(NOT_FOR_BATCHES) and not route.param_convertors
        }
        self._handle = bare.build_middleware_stack()

    async def post(self, path: str, body: bytes | memoryview, left: asyncio.Event, client: str = "") -> DirectAnswer:
        """Return the answer to a request of `client`, under the limits of its key; no key is checked here.

        When `left` is set, the request ends as if its client had disconnected.
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
                if trace is not None:
                    trace.answer(status)
            else:
                written.extend(message.get("body", b""))

        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._app,
            "state": {"request_id": request_id, "arrival_s": time.monotonic(), "client": client},
        }
        trace = None if self._tracing is None else self._tracing.begin(scope, request_id)
        scope["state"]["trace"] = trace
        named = REQUEST_ID.set(request_id)
        ALLOWANCE.set(self._app.state.clients.allowance(client))
        try:
            await self._handle(scope, receive, send)
        finally:
            REQUEST_ID.reset(named)
            if trace is not None:
                trace.end()
        return DirectAnswer(status, request_id, bytes(written))
