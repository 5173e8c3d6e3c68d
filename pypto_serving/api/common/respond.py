"""Answer with a generation, as one JSON object or as server-sent events. A disconnect ends the generation."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pypto_serving.api.common.body import Generating, Prepare, ReadBody
from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.generation import Consume, Generation
from pypto_serving.api.generation.request import MAX_TIMEOUT_S, GenerationRequest
from pypto_serving.api.http.errors import ApiError, describe, internal_error
from pypto_serving.api.http.middleware import SERVER_SEND, WRITE_PART
from pypto_serving.api.service import Service
from pypto_serving.engine.client import Pause
from pypto_serving.errors import PyptoError, RequestError
from pypto_serving.threads import in_slow_thread
from pypto_serving.util import brief

logger = logging.getLogger("pypto_serving.api")
WriteNow = Callable[[bytes], bool]
"""Writes a part of a body at once; returns False if the part must be sent as a message instead."""
T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
TIMEOUT_HEADER = "x-request-timeout"
encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


class AnswerFormat(ABC):
    """Writes the answer to one request in an endpoint's form, whole or as server-sent events."""

    media_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    """The media type of a stream."""

    @abstractmethod
    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> object:
        """Return the whole answer as an object to encode as JSON."""

    def opening(self, usage: TokenUsage) -> bytes:
        """Return the events before the first token; `usage` counts the prompt."""
        return b""

    def ping(self, usage: TokenUsage) -> bytes:
        """Return bytes that keep a silent stream alive, by default a comment. They may precede the opening."""
        return b": ping\n\n"

    @abstractmethod
    def event(self, delta: Delta) -> bytes:
        """Return the events of one delta; b"" if the delta is held back for later."""

    @property
    def writer(self) -> Callable[[Delta], bytes]:
        """Return the function that encodes one delta as events."""
        return self.event

    @abstractmethod
    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the event that ends a stream after `error`."""


NewFormat = Callable[[ReadBody, GenerationRequest], AnswerFormat]


async def generate(
    request: Request, endpoint: Generating, prefix: str, new_format: NewFormat, prepare: Prepare | None = None
) -> Response:
    """Read a body, submit its request under an id that begins with `prefix`, and answer in the endpoint's form.

    Raises the errors of `Reading.read` and of Generation.
    """
    body: ReadBody = await request.app.state.reading.read(request, endpoint, prepare)
    wanted = body.generation(prefix + uuid.uuid4().hex)
    form = new_format(body, wanted)
    if not body.stream:
        return await respond_whole(request, wanted, form.response, body.headers())
    return EventStream(request.app.state.service, _of_request(request, wanted), form, body.headers(), body.ping_s)


def answer_json(value: object, status: int = 200) -> Response:
    """Answer with a value as JSON."""
    return Response(encode(value), status, media_type="application/json")


def _of_request(request: Request, wanted: GenerationRequest) -> GenerationRequest:
    """Add the id and trace of the HTTP request, and a deadline: the shorter timeout of body and header.

    Timeouts count from the arrival of the request's first line. Raises RequestError for a header that is not a time.
    """
    state, given = request.state, request.headers.get(TIMEOUT_HEADER)
    limits = [] if given is None else [_seconds(given)]
    if wanted.timeout_s is not None:
        limits.append(wanted.timeout_s)
    deadline_s = state.arrival_s + min(limits) if limits else None
    return replace(wanted, http_id=state.request_id, trace=state.trace, deadline_s=deadline_s)


async def respond_whole(
    request: Request,
    wanted: GenerationRequest,
    make: Callable[[list[ChoiceOutput], TokenUsage], object],
    headers: dict[str, str],
) -> Response:
    """Submit the request `wanted`, and answer with `make(outputs, usage)` as JSON."""
    generation = Generation(request.app.state.service, _of_request(request, wanted))
    try:
        outputs = await until_disconnect(request.receive, generation.collect())

        def write() -> bytes:
            return encode(make(outputs, generation.usage()))

        content = await in_slow_thread(write) if wanted.prompt_logprobs else write()
        return Response(content, 200, headers, "application/json")
    except ClientDisconnect:
        return nobody_listens()
    finally:
        generation.close()


class EventStream(Response):
    """Streams a generation as server-sent events; deltas that wait are sent in one write.

    The constructor submits the request, after everything else that may fail. The request is admitted then, so the
    status line is sent at once, and later errors become events. With `ping_s`, a ping is sent after that many seconds
    without another event.
    """

    def __init__(
        self,
        service: Service,
        wanted: GenerationRequest,
        form: AnswerFormat,
        headers: dict[str, str],
        ping_s: float | None,
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._form = form
        self._ping_s = ping_s
        fixed = {
            "content-type": form.media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self.init_headers(fixed | headers)
        self._has_prompt_logprobs = bool(wanted.prompt_logprobs)
        self._generation = Generation(service, wanted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write, write_now = scope.get(SERVER_SEND, send), scope.get(WRITE_PART, lambda body: False)
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self._run(send, write, write_now))
        finally:
            self._generation.close()

    async def _run(self, send: Send, write: Send, write_now: WriteNow) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with pinging(write, lambda: self._form.ping(self._generation.usage()), self._ping_s) as note_write:
                await self._generation.run(self._consumer(write, write_now, note_write))
            last = self._form.closing(self._generation.usage())
        except PyptoError as error:
            last = self._form.failure(describe(error))
        except Exception:
            logger.exception("stream %s failed", self._generation.id)
            last = self._form.failure(internal_error(self._generation.id))
        await write({"type": "http.response.body", "body": last, "more_body": False})

    def _consumer(self, write: Send, write_now: WriteNow, note_write: Callable[[], None] | None) -> Consume:
        """Return the consumer that writes deltas, without waiting if `write_now` can.

        The opening is sent with the first delta, since clients take it for the first token.
        Prompt log-probabilities take long to encode, so a thread encodes them.
        """
        event = self._form.writer

        async def pass_on_in_thread(deltas: list[Delta]) -> None:
            if body := await in_slow_thread(lambda: b"".join(map(event, deltas))):
                if note_write is not None:
                    note_write()
                await send_part(write, body)

        if self._has_prompt_logprobs:
            return pass_on_in_thread

        opened = False

        def pass_on(deltas: list[Delta]) -> Pause:
            nonlocal opened
            opening = b"" if opened else self._form.opening(self._generation.usage())
            opened = True
            body = opening + (event(deltas[0]) if len(deltas) == 1 else b"".join(map(event, deltas)))
            if not body:
                return None
            if note_write is not None:
                note_write()
            return None if write_now(body) else send_part(write, body)

        return pass_on


async def send_part(write: Send, body: bytes) -> None:
    """Send a part of a body, and wait while the client does not keep up."""
    await write({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def pinging(
    write: Send, ping: Callable[[], bytes], interval_s: float | None
) -> AsyncIterator[Callable[[], None] | None]:
    """Within the block, write a ping after each `interval_s` without a write.

    Yield a function to call at each other write; yield None, and send no pings, if `interval_s` is None.
    """
    if interval_s is None:
        yield None
        return
    written_s = time.monotonic()

    def note_write() -> None:
        nonlocal written_s
        written_s = time.monotonic()

    async def keep_alive() -> None:
        while True:
            if (wait_s := written_s + interval_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            else:
                note_write()
                await send_part(write, ping())

    task = asyncio.create_task(keep_alive())
    try:
        yield note_write
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; if the client disconnects first, cancel `work` and raise ClientDisconnect.

    Must be called after the request's body was read, when `receive` waits for the disconnect.
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
    """Return the response for a client that has disconnected; only logs and metrics see its status."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        message = f"{TIMEOUT_HEADER} is {brief(text)}, but must be a number of seconds above 0, at most {MAX_TIMEOUT_S}"
        raise RequestError(message, param=TIMEOUT_HEADER)
    return seconds


def one_line(event: bytes) -> bytes:
    """Escape the characters beyond ASCII at which some clients split lines: U+0085, U+2028 and U+2029."""
    event = event.replace(b"\xc2\x85", b"\\u0085")
    return event.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def named(event: msgspec.Struct) -> bytes:
    """Encode a server-sent event whose name is the type of its data."""
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + one_line(encode(event)) + b"\n\n"
