"""Read the requests of a batch file, and answer all that have no answer yet: one JSON object a line, as OpenAI does."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import Message, Scope

from pypto_serving.api.batch.store import lock
from pypto_serving.api.common.respond import CLIENT_CLOSED_REQUEST
from pypto_serving.api.http.allowance import ALLOWANCE
from pypto_serving.api.http.middleware import VERSION, FaultHandler
from pypto_serving.logs import REQUEST_ID
from pypto_serving.threads import in_slow_thread
from pypto_serving.util import brief, one_of

MAX_ID_CHARS = 512
_BEGINNING = b'{"id":"batch_req_'
MAX_PROBLEMS = 100
"""Reading stops after this many invalid lines, all of which the refusal lists."""
BLANKS = 2
"""A file may have this many times as many lines as requests, so some may be blank."""


class BatchRequest(msgspec.Struct):
    """One line of a file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"

    @property
    def key(self) -> bytes:
        """Return the request's key, unique in its file."""
        return key_of(self.custom_id)


class DirectAnswer(NamedTuple):
    """The answer to a request. `request_id` is the request's id in the log."""

    status: int
    request_id: str
    body: bytes


class Problem(NamedTuple):
    """Why a line, counted from 1, is not a valid request."""

    line: int
    message: str


class Found(NamedTuple):
    """The number of requests in a file, and its problems."""

    num_requests: int
    problems: list[Problem]


class Limits(NamedTuple):
    """Limits of a file; `urls` are the allowed endpoints."""

    max_requests: int
    max_line_bytes: int
    urls: Collection[str]


class _Body(msgspec.Struct):
    stream: bool | None = None


_REQUEST, _BODY = msgspec.json.Decoder(BatchRequest), msgspec.json.Decoder(_Body)


def key_of(custom_id: str) -> bytes:
    """Hash the `custom_id` of a request, which is unique in its file."""
    return hashlib.blake2b(custom_id.encode(), digest_size=16).digest()


def check(path: Path, limits: Limits) -> Found:
    """Check all requests of a file, up to MAX_PROBLEMS problems. Raises OSError."""
    seen: set[bytes] = set()
    problems: list[Problem] = []
    for number, line in _lines(path, limits.max_line_bytes):
        if line and (problem := _problem(line, seen, limits)):
            problems.append(Problem(number, problem))
        if number > BLANKS * limits.max_requests:
            problems.append(Problem(number, f"the file has more than {number - 1} lines; leave blank ones out"))
            break
        if len(problems) == MAX_PROBLEMS or len(seen) > limits.max_requests or len(line) > limits.max_line_bytes:
            break
    if not seen and not problems:
        problems.append(Problem(1, "the file has no requests"))
    return Found(len(seen), problems)


def read(path: Path, limits: Limits) -> Iterator[BatchRequest]:
    """Iterate over the requests of a file in which `check` found no problems."""
    for _, line in _lines(path, limits.max_line_bytes):
        if line:
            yield _REQUEST.decode(line)


def write(request: BatchRequest, answer: DirectAnswer) -> bytes:
    """Write the line of an answer."""
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": msgspec.Raw(answer.body)}
    line = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": request.custom_id, "response": response, "error": None}
    return msgspec.json.encode(line) + b"\n"


def require_beginning(cut: bytes) -> None:
    """Raise ValueError unless `cut` may be the beginning of a line of `write`."""
    if not cut.startswith(_BEGINNING[: len(cut)]):
        raise ValueError(f"{cut[:100]!r} is not the beginning of an answer")


def _lines(path: Path, limit: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the lines of a file with their numbers, without white space at the ends; cut lines over `limit`."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(limit + 2):
            number += 1
            yield number, line.strip()


def _problem(line: bytes, seen: set[bytes], limits: Limits) -> str:
    """Return the problem of a line, or "" if it is valid; add its request to `seen`."""
    if len(line) > limits.max_line_bytes:
        return f"the line has more than {limits.max_line_bytes} bytes; send less"
    try:
        request = _REQUEST.decode(line)
        body = _BODY.decode(request.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"this is not a request: {error}; send custom_id, url and body as a JSON object"
    before = len(seen)
    seen.add(request.key)
    if len(seen) > limits.max_requests:
        return f"the file has more than {limits.max_requests} requests; split it"
    if len(seen) == before:
        return f"custom_id is {request.custom_id[:MAX_ID_CHARS]!r} like that of an earlier line; give each its own"
    if not 0 < len(request.custom_id) <= MAX_ID_CHARS:
        return f"custom_id has {len(request.custom_id)} characters, but must have between 1 and {MAX_ID_CHARS}"
    if request.method != "POST":
        return f"method is {brief(request.method)}, but must be 'POST'"
    if request.url not in limits.urls:
        return f"url is {brief(request.url)}, but must be {one_of(sorted(limits.urls))}"
    return "stream is not available in batches; leave it out" if body.stream else ""


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


@dataclass
class Run:
    """Answers the requests of one file for `client`, `width` at once. Setting `left` ends unanswered requests."""

    direct: Direct
    output: AnswerFile
    width: int
    on_answer: Callable[[], None] = lambda: None
    client: str = ""
    left: asyncio.Event = field(default_factory=asyncio.Event, init=False)

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
                if request.key in self.output.answered:
                    continue
                if len(running) == self.width:
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
            answer = await self.direct.post(request.url, memoryview(request.body), self.left, self.client)
            if answer.status == CLIENT_CLOSED_REQUEST:
                return
            if answer.status not in BUSY:
                self.output.add(request, write(request, answer), answer.status)
                self.on_answer()
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
