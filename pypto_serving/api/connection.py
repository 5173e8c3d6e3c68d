"""Bound what a connection may cost before its request is answered: bytes and time of head and body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pypto_serving.api.errors import RETRY_UNAVAILABLE_S, ApiError, BodyTooLargeError, describe
from pypto_serving.api.gate import NO_PLACE, Gate
from pypto_serving.api.middleware import ANSWERED, BODY_PARSED

MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 128
"""Largest head of a request (its first line and headers), and most headers."""
HEAD_TIMEOUT_S = 10.0
"""Longest time from the connection, or from the first byte of a later request, to the end of the head."""
BODY_PATIENCE_S, BODY_BYTES_PER_S = 30.0, 16 << 10
"""A body must end, or come at BODY_BYTES_PER_S, in every BODY_PATIENCE_S."""
MAX_PIPELINED = 16
"""Most requests that a client may send before the first is answered."""
MAX_DROPPED_BODIES = 4
"""A body is read up to this multiple of its limit, and dropped, since a client reads no answer while it sends."""
_HOP_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


class _RefusedError(Exception):
    """Ends a request within a callback of the parser."""

    def __init__(self, answer: ApiError) -> None:
        super().__init__(answer.message)
        self.answer = answer


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits. A request beyond one gets its status, and the connection is closed.

    - A request to upgrade to another protocol is answered in HTTP/1.1, as RFC 9110, section 7.8, allows. Most clients
      that offer HTTP/2 in this way need that.
    - A body that is announced as too large is refused before it is sent, if the client waits for leave to send it.
    - Answers to HTTP/1.0 have no chunks.
    """

    def __init__(self, *, gate: Gate, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._gate = gate
        self._timer: asyncio.TimerHandle | None = None
        self._num_bytes = self._body_bytes = 0
        self._in_body = self._surplus = False
        self._last_words: ApiError | None = None
        self._answered: RequestResponseCycle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()
        self._surplus = not self._gate.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._gate.leave(self)
        if self._answered is not None:  # uvicorn tells only the newest of several pipelined requests
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._last_words is not None:
            return
        self._unset_keepalive_if_required()
        continues = self._head_bytes > 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.answer if isinstance(cause, _RefusedError) else _INVALID)
        if self._in_head:
            self._head_bytes += len(data) if continues else 1  # the first bytes may end the request before
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_LARGE_HEAD)
        if self._in_body or self._head_bytes:
            self._hold(len(data))

    def _hold(self, num_new: int) -> None:
        """Count the bytes of an unfinished request, unless they are dropped."""
        self._num_bytes += num_new
        dropped = self._in_body and (self.cycle.response_complete or self._body_bytes > self._gate.max_body_bytes)
        if not self.transport.is_closing():
            self._gate.hold(self, 0 if dropped else self._num_bytes)

    def _go_on_without_upgrade(self, body: bytes) -> None:
        """Parse the same request again, without the headers that ask for another protocol."""
        kept = [name + b": " + value for name, value in self.headers if name not in _HOP_HEADERS]
        line = b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._upgrades = False
        self.data_received(b"\r\n".join([line, *kept, b"", body]))

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._check_head()
        self._upgrades = self.parser.should_upgrade()
        if self._upgrades:
            return
        self._in_body, self._body_bytes = True, 0
        self._start_timer(BODY_PATIENCE_S, lambda: self._check_body(0))
        super().on_headers_complete()
        cycle: Any = self.cycle
        cycle.scope[BODY_PARSED] = self._body_parsed
        if self._surplus:
            cycle.keep_alive = False
        if self.parser.get_http_version() == "1.0":
            cycle.send = _unchunked(cycle)

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrades:
            self._stop_timer()
            self._in_body = False
            self._gate.received(self)
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._in_body and self.expect_100_continue:
            self.transport.close()  # the client, which was refused, need not send the body
        super().on_response_complete()
        if self.cycle.response_complete:
            self._gate.idle(self)
            if self._last_words is not None:
                self._end(self._last_words)

    def _body_parsed(self) -> None:
        if not self._in_body:
            self._gate.release(self)

    def _check_head(self) -> None:
        """Raise _RefusedError if the request ends here."""
        if len(self.headers) > MAX_HEADERS or sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            raise _RefusedError(_LARGE_HEAD)
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

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes, self._num_bytes, self._upgrades = True, 0, 0, False
        self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)

    def _start_timer(self, delay_s: float, late: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer(HEAD_TIMEOUT_S, self._head_is_late)  # the request before is still being answered
        elif self._head_bytes:
            self._refuse(_LATE_HEAD)
        else:
            self.transport.close()

    def _check_body(self, bytes_before: int) -> None:
        """End a body that came slower than BODY_BYTES_PER_S, unless the server itself did not read."""
        received = self._body_bytes - bytes_before
        if self.flow.read_paused or received >= BODY_PATIENCE_S * BODY_BYTES_PER_S:
            now = self._body_bytes
            self._start_timer(BODY_PATIENCE_S, lambda: self._check_body(now))
        else:
            self._refuse(_LATE_BODY)

    # Refusals.

    def close_idle(self) -> None:
        """End the connection, on which no request has begun."""
        self.transport.close()

    def refuse_busy(self, reason: str) -> None:
        """Answer with a 503 and end the connection."""
        self._refuse(_busy(reason), at_once=True)

    def _refuse(self, answer: ApiError, at_once: bool = False) -> None:
        """Answer with an error, unless an answer has begun, and close the connection.

        If a head is refused, the requests before it are answered first, unless `at_once`; what follows it is not read.
        """
        self._stop_timer()
        if self.transport.is_closing() or self._last_words is not None:
            return
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:
            self._count(answer)
            self._end(answer)
        elif not (self._in_body or at_once):
            self._count(answer)
            self._last_words = answer
        elif cycle.response_started or self.pipeline:
            self.transport.close()
        else:
            self._count(answer)
            cycle.scope[ANSWERED] = True
            self._end(answer)

    def _count(self, answer: ApiError) -> None:
        self._gate.refused(answer.status, answer.message)

    def _end(self, answer: ApiError) -> None:
        body, retry_after_s = answer.payload(), answer.retry_after_s
        retry = "" if retry_after_s is None else f"retry-after: {retry_after_s}\r\n"
        head = (
            f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
            f"{retry}content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _busy(reason: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after_s=RETRY_UNAVAILABLE_S)


def _unchunked(cycle: Any) -> Send:
    """Wrap the cycle's `send` for HTTP/1.0, where the end of the connection ends a body of unknown length."""
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
_NO_CONNECT = ApiError(HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT is not allowed; this server is no proxy")
_INVALID = ApiError(HTTPStatus.BAD_REQUEST, "this is not a valid HTTP/1.1 request")
_PIPELINED = ApiError(
    HTTPStatus.TOO_MANY_REQUESTS, f"more than {MAX_PIPELINED} requests were pipelined; wait for answers"
)
_LATE_HEAD = ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not end within {HEAD_TIMEOUT_S:g} s")
_LATE_BODY = ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the body came slower than {BODY_BYTES_PER_S} bytes per second")
