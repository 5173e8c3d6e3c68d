"""Answer with a generation: one JSON object or server-sent events. A disconnect ends the generation."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from types import coroutine
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pypto_serving.api.generation.choice import ChoiceOutput, Delta, TokenUsage
from pypto_serving.api.generation.generation import Consume, Generation
from pypto_serving.api.generation.request import MAX_TIMEOUT_S, GenerationRequest
from pypto_serving.api.http.errors import ApiError, describe, internal_error
from pypto_serving.api.http.middleware import SERVER_SEND, WRITE_PART
from pypto_serving.api.service import Service
from pypto_serving.engine.client import Pause
from pypto_serving.errors import PyptoError, RequestError
from pypto_serving.util import brief

logger = logging.getLogger("pypto_serving.api")
WriteNow = Callable[[bytes], bool]
"""Writes a part of a body, or returns False if it has to be sent."""
T = TypeVar("T")
CLIENT_CLOSED_REQUEST = 499
TIMEOUT_HEADER = "x-request-timeout"
encode = msgspec.json.encode
DONE, PING = b"data: [DONE]\n\n", b": ping\n\n"


class AnswerFormat(Protocol):
    """Write one answer in an endpoint's form: whole, or as server-sent events. Made for one request."""

    def response(self, outputs: list[ChoiceOutput], usage: TokenUsage) -> object:
        """Write the whole answer, to be encoded as JSON."""

    def opening(self, usage: TokenUsage) -> bytes:
        """Write the events before the first token; `usage` is that of the prompt."""

    def ping(self, usage: TokenUsage) -> bytes:
        """Write what keeps a silent stream alive; it may come before the opening."""

    @property
    def writer(self) -> Callable[[Delta], bytes]:
        """Return what writes the events of one delta; b"" if it is held back for later."""

    def closing(self, usage: TokenUsage) -> bytes:
        """Write the last events."""

    def failure(self, error: ApiError) -> bytes:
        """Write the event that ends a stream in which `error` came up."""


async def respond(
    request: Request,
    wanted: GenerationRequest,
    form: AnswerFormat,
    *,
    stream: bool,
    headers: dict[str, str],
    ping_s: float | None = None,
) -> Response:
    """Submit what is `wanted`, and answer with it. For `ping_s` see EventStream. Raises what Generation raises."""
    if stream:
        return EventStream(request.app.state.service, _of_request(request, wanted), form, headers, ping_s)
    return await respond_whole(request, wanted, form.response, headers)


def _of_request(request: Request, wanted: GenerationRequest) -> GenerationRequest:
    """Return what is `wanted` with the deadline, the id and the trace of its HTTP request."""
    state = request.state
    return replace(with_deadline(request, wanted), http_id=state.request_id, trace=state.trace)


async def respond_whole(
    request: Request,
    wanted: GenerationRequest,
    make: Callable[[list[ChoiceOutput], TokenUsage], Any],
    headers: dict[str, str],
) -> Response:
    """Submit what is `wanted`, and answer with the JSON that `make` makes of its outputs."""
    generation = Generation(request.app.state.service, _of_request(request, wanted))
    try:
        outputs = await until_disconnect(request.receive, generation.collect())
        write = partial(_content, make, outputs, generation.usage())
        content = await asyncio.to_thread(write) if wanted.prompt_logprobs else write()
        return Response(content, 200, headers, "application/json")
    except ClientDisconnect:
        return nobody_listens()
    finally:
        generation.close()


def _content(
    make: Callable[[list[ChoiceOutput], TokenUsage], Any], outputs: list[ChoiceOutput], usage: TokenUsage
) -> bytes:
    return msgspec.json.encode(make(outputs, usage))


class EventStream(Response):
    """Stream a generation as server-sent events; waiting deltas leave in one write.

    Making one submits the request, as the last thing that may fail. The status line leaves at once, since the request
    is admitted; an error that comes later is an event. With `ping_s`, a ping is sent whenever nothing else was for that
    many seconds.
    """

    def __init__(
        self,
        service: Service,
        wanted: GenerationRequest,
        form: AnswerFormat,
        headers: dict[str, str],
        ping_s: float | None = None,
    ) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._form = form
        self._ping_s = ping_s
        fixed = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self.init_headers(fixed | headers)
        self._has_prompt_logprobs = bool(wanted.prompt_logprobs)
        self._generation = Generation(service, wanted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write, write_now = scope[SERVER_SEND], scope.get(WRITE_PART, _never)
        try:
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self._run(send, write, write_now))
        finally:
            self._generation.close()

    async def _run(self, send: Send, write: Send, write_now: WriteNow) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with pinging(write, self._ping, self._ping_s) as noted_write:
                await self._generation.run(self._writer(noted_write, write_now if self._ping_s is None else _never))
            last = self._form.closing(self._generation.usage())
        except PyptoError as error:
            last = self._form.failure(describe(error))
        except Exception:
            logger.exception("stream %s failed", self._generation.id)
            last = self._form.failure(internal_error(self._generation.id))
        await write({"type": "http.response.body", "body": last, "more_body": False})

    def _writer(self, write: Send, write_now: WriteNow) -> Consume:
        """Return the consumer that writes deltas, at once if `write_now` can.

        The opening waits for the first delta: clients take it for a token.
        The log-probabilities of a prompt take long to write, so that happens in a thread.
        """
        event = self._form.writer

        async def pass_on_in_thread(deltas: list[Delta]) -> None:
            body = await asyncio.to_thread(lambda: b"".join(map(event, deltas)))
            if body:
                await write({"type": "http.response.body", "body": body, "more_body": True})

        if self._has_prompt_logprobs:
            return pass_on_in_thread

        opened = False

        def pass_on(deltas: list[Delta]) -> Pause:
            nonlocal opened
            opening = b"" if opened else self._form.opening(self._generation.usage())
            opened = True
            body = opening + (event(deltas[0]) if len(deltas) == 1 else b"".join(map(event, deltas)))
            if not body or write_now(body):
                return None
            return begun(write({"type": "http.response.body", "body": body, "more_body": True}))

        return pass_on

    def _ping(self) -> bytes:
        return self._form.ping(self._generation.usage())


def _never(body: bytes) -> bool:
    return False


@asynccontextmanager
async def pinging(write: Send, ping: Callable[[], bytes], interval_s: float | None) -> AsyncIterator[Send]:
    """Yield a `write` to use in the block, in which a ping is written whenever nothing else was for `interval_s`."""
    if interval_s is None:
        yield write
        return
    written_s = time.monotonic()

    async def noted_write(message: Message) -> None:
        nonlocal written_s
        written_s = time.monotonic()
        await write(message)

    async def keep_alive() -> None:
        while True:
            if (wait_s := written_s + interval_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            else:
                await noted_write({"type": "http.response.body", "body": ping(), "more_body": True})

    task = asyncio.create_task(keep_alive())
    try:
        yield noted_write
    finally:
        task.cancel()
        await asyncio.wait([task])


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


def with_deadline(request: Request, wanted: GenerationRequest) -> GenerationRequest:
    """Return what is `wanted` with the earlier deadline of body and header, counted from the request's first line.

    Raises RequestError for a header that is no time.
    """
    given = request.headers.get(TIMEOUT_HEADER)
    limits = [] if given is None else [_seconds(given)]
    if wanted.timeout_s is not None:
        limits.append(wanted.timeout_s)
    return replace(wanted, deadline_s=request.state.arrival_s + min(limits)) if limits else wanted


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
    """Write a server-sent event that is named by the type of its data."""
    return f"event: {event.__struct_config__.tag}\ndata: ".encode() + one_line(encode(event)) + b"\n\n"
