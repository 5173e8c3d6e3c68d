"""Limit the bytes and the time of a request's head and body on a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pypto_serving.api.http.errors import MAX_DROPPED_BODIES, RETRY_UNAVAILABLE_S, ApiError, BodyTooLargeError, describe
from pypto_serving.api.http.gate import NO_MEMORY, NO_PLACE, Gate
from pypto_serving.api.http.middleware import ANSWERED, BODY_PARSED, SERVER_SEND, WRITE_PART, request_id_of
from pypto_serving.errors import SHUTTING_DOWN

MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 128
"""Limits of a request's head (first line, headers and trailers): bytes, and number of headers."""
MAX_LINE_BYTES = MAX_HEAD_BYTES + (256 << 10)
"""Limit of bytes that the parser buffers: an unfinished line, and the rest of the read in which it began."""
HEAD_TIMEOUT_S = 10.0
"""Longest time from the connection, or from the first byte of a later request, to the end of the head."""
BODY_PATIENCE_S, BODY_BYTES_PER_S = 30.0, 16 << 10
"""In every period of BODY_PATIENCE_S, a body must end or arrive at BODY_BYTES_PER_S or faster."""
FREE_PIECES, PIECE_BYTES = 16_384, 64
"""A body may arrive in FREE_PIECES chunks, or reads, of any size; if in more, they must average PIECE_BYTES."""
MAX_PIPELINED = 16
"""Limit of requests that a client sends before the first is answered."""
_UPGRADES = frozenset({b"upgrade", b"http2-settings"})
"""Headers, and values of `Connection`, that ask for an upgrade to another protocol."""


class _RefusedError(Exception):
    """Raised in a callback of the parser to end the request."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(answer.message)
        self.answer = answer


class _Phase(Enum):
    """Part of a request that the client is sending: none, head, body, or the rest of an already answered body."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()
    REST = auto()


class _Request:
    """Counts the memory of one request, until its body is parsed or dropped."""

    num_bytes = 0
    dropped = False


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits. A request that exceeds one is answered with an error, and the connection closed.

    - Requests to upgrade to another protocol are answered as if they did not ask for it, as RFC 9110, section 7.8,
      allows. Most clients that offer HTTP/2 in this way need that.
    - If the client waits for `100 Continue`, a body announced as too large is refused before it is sent.
    - If a body is answered before it ends, it must end within the keep-alive time, or the connection is closed.
    - Trailers are dropped. Answers to HTTP/1.0 are not chunked.
    """

    def __init__(self, *, gate: Gate, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._gate = gate
        self._timer: asyncio.TimerHandle | None = None
        self._phase = _Phase.NOTHING
        self._request = _Request()
        self._num_headers = self._head_bytes = self._body_bytes = self._num_pieces = 0
        self._read_bytes = self._line_bytes = 0
        self._upgrades = self._surplus = False
        self._last_words: ApiError | None = None
        self._answered: RequestResponseCycle | None = None
        self._refused_id = ""

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)
        self._surplus = not self._gate.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._gate.leave(self)
        if self._answered is not None:  # of pipelined requests, uvicorn marks only the newest as disconnected
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Refuse an unfinished request because the server is ending; the server waits for the other answers."""
        if self._phase in (_Phase.HEAD, _Phase.BODY):
            self._refuse(_ENDING)
        else:
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        try:
            self._read_bytes = len(data)
            self._line_bytes += len(data)
            self._feed(data)
            if self._phase is not _Phase.NOTHING:
                self._hold()
        except _RefusedError as refused:
            self._refuse(refused.answer)
        self._note()

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            raise cause if isinstance(cause, _RefusedError) else _RefusedError(_INVALID) from None

    def _go_on_without_upgrade(self, body: bytes) -> None:
        """Parse the same request again, without the headers that ask for an upgrade."""
        self._drop(self._request)
        line = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [name + b": " + value for name, value in self.headers if name not in _UPGRADES | {b"connection"}]
        tokens = [token.strip() for name, value in self.headers if name == b"connection" for token in value.split(b",")]
        others = b", ".join(token for token in tokens if token.lower() not in _UPGRADES)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._feed(b"\r\n".join([line, *kept, b"connection: " + others, b"", body]))

    # Memory and place.

    def _hold(self, complete: bool = False) -> None:
        """Report the memory of the newest request to the gate. Raises _RefusedError if it is too much."""
        request = self._request
        num_bytes = self._line_bytes
        if num_bytes > MAX_LINE_BYTES:
            raise _RefusedError(_LARGE_HEAD)
        if not request.dropped:
            num_bytes += self._head_bytes + self._body_bytes
        grown, request.num_bytes = num_bytes - request.num_bytes, num_bytes
        if not self._gate.hold(self, grown, complete):
            raise _RefusedError(_busy(NO_MEMORY))

    def _drop(self, request: _Request) -> None:
        """Record that the bytes of a request are no longer in memory, and keep no further ones."""
        request.dropped = True
        self._gate.release(self, request.num_bytes)
        request.num_bytes = 0

    def _note(self) -> None:
        """Report to the gate whether the connection is waiting for its client."""
        receives = self._phase in (_Phase.HEAD, _Phase.BODY)
        waits = self._phase is _Phase.BODY and self._answered is self.cycle and not self.cycle.response_started
        if self.transport.is_closing() or (self._is_answering() and not waits):
            self._gate.busy(self)
        elif receives:
            self._gate.sending(self, self._body_bytes)
        else:
            self._gate.idle(self)

    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._phase, self._request, self._upgrades = _Phase.HEAD, _Request(), False
        self._num_headers = self._head_bytes = self._body_bytes = self._num_pieces = 0
        self._line_bytes = self._read_bytes
        self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        self._count_head(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._count_head(name, value)
        if self._phase is _Phase.HEAD:
            super().on_header(name, value)

    def _count_head(self, *parts: bytes) -> None:
        self._head_bytes += sum(map(len, parts))
        self._line_bytes = self._read_bytes
        if self._head_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            raise _RefusedError(_LARGE_HEAD)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._upgrades = self.parser.should_upgrade()
        if self._upgrades:
            return
        super().on_headers_complete()
        if self.pipeline:
            self._keep_reading()
        self._phase = _Phase.BODY
        self._start_timer(BODY_PATIENCE_S, lambda: self._check_body(0))
        cycle: Any = self.cycle
        cycle.scope[BODY_PARSED] = partial(self._drop, self._request)
        cycle.scope[WRITE_PART] = partial(_write_part, cycle, self.flow, self.transport)
        if self._surplus:
            cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            cycle.send = _unchunked(cycle)
        cycle.scope[SERVER_SEND] = cycle.send

    def _keep_reading(self) -> None:
        """Continue reading during an unfinished answer. Uvicorn pauses then, and would not notice a disconnect."""
        self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._num_pieces += 1
        if self._num_pieces > FREE_PIECES and self._body_bytes < self._num_pieces * PIECE_BYTES:
            raise _RefusedError(_SMALL_PIECES)
        self._read_bytes -= len(body)
        self._line_bytes = self._read_bytes
        if self._body_bytes > self._gate.max_body_bytes and self._answered is self.cycle:
            self._drop(self._request)  # the handler has dropped the body
        super().on_body(body)
        if self._answered is not self.cycle and self._body_bytes <= self._gate.max_body_bytes:
            self._keep_reading()

    def on_message_complete(self) -> None:
        if not self._upgrades:
            self._line_bytes = 0
            self._hold(complete=True)
            self._stop_timer()
            self._phase = _Phase.NOTHING
            super().on_message_complete()

    def on_response_complete(self) -> None:
        cycle = cast(Any, self._answered)
        cycle.scope[BODY_PARSED]()
        if self._phase is _Phase.BODY and cycle is self.cycle:
            self._phase = _Phase.REST
            self._stop_timer()
            if self.expect_100_continue:
                self.transport.close()  # the client was refused, and need not send the body
        super().on_response_complete()
        if self._phase is _Phase.HEAD:
            self._unset_keepalive_if_required()
        if self._last_words is not None and not self._is_answering():
            self._end(self._last_words)
        self._note()

    def _check_head(self) -> None:
        """Raise _RefusedError if the head alone is a reason to refuse the request."""
        if self.parser.get_method() == b"CONNECT":
            raise _RefusedError(_NO_CONNECT)
        if self._surplus and self.url.partition(b"?")[0] != b"/health":
            raise _RefusedError(_busy(NO_PLACE))
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _RefusedError(_PIPELINED)
        limit = self._gate.max_body_bytes
        length = int(next((value for name, value in self.headers if name == b"content-length"), 0))
        if length > (limit if self.expect_100_continue else MAX_DROPPED_BODIES * limit):
            raise _RefusedError(describe(BodyTooLargeError(limit)))

    # Time.

    def _start_timer(self, delay_s: float, late: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _head_is_late(self) -> None:
        if self._is_answering():
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)
        elif self._phase is _Phase.HEAD:
            self._refuse(_LATE_HEAD)
        else:
            self.transport.close()

    def _check_body(self, bytes_before: int) -> None:
        """Refuse a body that arrived slower than BODY_BYTES_PER_S, unless the server itself paused reading."""
        received = self._body_bytes - bytes_before
        if self.flow.read_paused or received >= BODY_PATIENCE_S * BODY_BYTES_PER_S:
            now = self._body_bytes
            self._start_timer(BODY_PATIENCE_S, lambda: self._check_body(now))
        else:
            self._refuse(_LATE_BODY)

    # Refusals.

    def close_idle(self) -> None:
        """Close the connection; no request is in progress on it."""
        self.transport.close()

    def cut(self) -> bool:
        """Close the connection if an answer has begun but not ended. Return whether it was closed."""
        cuts = self._answered is not None and self._answered.response_started and self._is_answering()
        if cuts:
            self.transport.abort()
        return cuts

    def refuse_busy(self, reason: str) -> None:
        """Answer the unfinished request with a 503, and end the connection."""
        self._refuse(_busy(reason))

    def _refuse(self, answer: ApiError) -> None:
        """Answer the newest request with an error, unless its answer has begun, and close the connection.

        Earlier requests are answered first. Later input is not read.
        """
        self._stop_timer()
        if self.transport.is_closing() or self._last_words is not None:
            return
        phase, self._phase = self._phase, _Phase.NOTHING
        if phase is not _Phase.NOTHING:
            self._drop(self._request)
        in_body, runs = phase is _Phase.BODY, self._answered is self.cycle
        cycle: Any = self.cycle
        if phase is _Phase.REST or (in_body and cycle.response_started):
            self.transport.close()
            return
        self._gate.refused(answer.status, answer.message)
        known = cycle.scope.get("state", {}).get("request_id") if in_body and runs else None
        self._refused_id = known or request_id_of(self.headers or ()).decode()
        if in_body and runs:
            cycle.scope[ANSWERED] = True
            self._end(answer)
        elif self._is_answering():
            if in_body:
                self.pipeline.popleft()
            self._last_words = answer
            self.parser, self.headers = None, []  # type: ignore[assignment]  # free what was read
        else:
            self._end(answer)

    def _end(self, answer: ApiError) -> None:
        """Write an answer without the application, and close the connection."""
        body = answer.payload()
        retry = "".join(f"{name}: {value}\r\n" for name, value in answer.all_headers().items())
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
            f"{retry}x-request-id: {self._refused_id}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()


def _busy(reason: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after_s=RETRY_UNAVAILABLE_S)


def _write_part(cycle: Any, flow: FlowControl, transport: asyncio.Transport, part: bytes) -> bool:
    """Write a middle part of an answer as a chunk. Return False if it must be sent as a message instead.

    This does the same as uvicorn's `send`, but without a coroutine, since it is called for every token of a stream.
    """
    if flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding:
        return False
    transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


def _unchunked(cycle: Any) -> Send:
    """Wrap the cycle's `send` for HTTP/1.0, in which the end of the connection marks the end of the body."""
    send: Send = cycle.send
    unknown = False

    async def send_unchunked(message: Message) -> None:
        nonlocal unknown
        if message["type"] == "http.response.start":
            unknown = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = False if unknown else None
        elif unknown:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_unchunked


_LARGE_HEAD = ApiError(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers",
)
_NO_CONNECT = ApiError(HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT is not allowed; this server is not a proxy")
_INVALID = ApiError(HTTPStatus.BAD_REQUEST, "this is not a valid HTTP/1.1 request")
_ENDING = _busy(SHUTTING_DOWN)
_PIPELINED = ApiError(
    HTTPStatus.TOO_MANY_REQUESTS, f"more than {MAX_PIPELINED} requests were pipelined; wait for answers"
)
_SMALL_PIECES = ApiError(
    HTTPStatus.BAD_REQUEST,
    f"the body came in more than {FREE_PIECES} chunks of less than {PIECE_BYTES} bytes on average; send larger ones",
)
_LATE_HEAD = ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not end within {HEAD_TIMEOUT_S:g} s")
_LATE_BODY = ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body came slower than {BODY_BYTES_PER_S} bytes per second")
