"""Bound what a connection may cost before its request is answered: bytes and time of head and body."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pypto_serving.api.errors import RETRY_UNAVAILABLE_S, ApiError

logger = logging.getLogger("pypto_serving.api")

MAX_HEAD_BYTES, MAX_HEADERS = 64 << 10, 128
"""Largest head of a request (its first line and headers), and most headers."""
HEAD_TIMEOUT_S = 10.0
"""Longest time from the connection, or from the first byte of a later request, to the end of the head."""
BODY_PATIENCE_S, BODY_BYTES_PER_S = 30.0, 16 << 10
"""A body may take BODY_PATIENCE_S, and the time that it takes at BODY_BYTES_PER_S."""
MAX_FILES, FILES_FOR_OTHERS = 65536, 128
"""Open files of this process, and how many of them are not for connections."""
SPARE_CONNECTIONS = 64
"""Connections above the limit that are still read, so that /health is answered and others get a 503."""
LOG_INTERVAL_S = 10.0
_HOP_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings"})


def max_connections() -> int:
    """Raise the soft limit of open files as far as allowed. Return how many connections fit under it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, min(soft, MAX_FILES) - FILES_FOR_OTHERS - SPARE_CONNECTIONS)


class _RefusedError(Exception):
    """Ends a request within a callback of the parser."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits. A request beyond one gets its status, and the connection is closed.

    A request to upgrade to another protocol is answered in HTTP/1.1, as RFC 9110, section 7.8, allows. Most clients
    that offer HTTP/2 in this way need that.
    """

    _logged_s = -math.inf

    def __init__(self, *, max_connections: int, count_refusal: Callable[[int], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._max_connections, self._count_refusal = max_connections, count_refusal
        self._timer: asyncio.TimerHandle | None = None

    # The connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()
        if len(self.connections) > self._max_connections + SPARE_CONNECTIONS:
            self._log("more connections than this process has files for")
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        continues = self._head_bytes > 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _RefusedError):
                self._refuse(error.__context__.status, str(error.__context__))
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "this is not a valid HTTP/1.1 request")
        if self._in_head:
            self._head_bytes += len(data) if continues else 1  # the first bytes may end the request before
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(*_TOO_LARGE)

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
        self._in_head = False
        if len(self.headers) > MAX_HEADERS or sum(len(n) + len(v) for n, v in self.headers) > MAX_HEAD_BYTES:
            raise _RefusedError(*_TOO_LARGE)
        if self.parser.get_method() == b"CONNECT":
            raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "CONNECT is not allowed; this server is no proxy")
        if len(self.connections) > self._max_connections and not self.url.startswith(b"/health"):
            raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections are open; try again later")
        self._upgrades = self.parser.should_upgrade()
        if not self._upgrades:
            self._body_bytes, self._body_began_s = 0, self.loop.time()
            self._start_timer(BODY_PATIENCE_S, self._check_body)
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrades:
            self._stop_timer()
            super().on_message_complete()

    # Time.

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes, self._upgrades = True, 0, False
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
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not end within {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _check_body(self) -> None:
        """End a body that is slower than BODY_BYTES_PER_S. Time in which the server does not read is not counted."""
        needed_s = self._body_bytes / BODY_BYTES_PER_S
        if self.flow.read_paused:
            self._body_began_s = self.loop.time() - needed_s
        if self.loop.time() - self._body_began_s < BODY_PATIENCE_S + needed_s:
            self._start_timer(BODY_PATIENCE_S / 10, self._check_body)
        else:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body came slower than {BODY_BYTES_PER_S} bytes per second")

    # Refusals.

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer with an error, unless an answer has begun, and close the connection."""
        self._stop_timer()
        if self.transport.is_closing():
            return
        self._log(message)
        if self.cycle is None or self.cycle.response_complete or not (self.cycle.response_started or self.pipeline):
            self._count_refusal(status)
            body = ApiError(status, message).payload()
            retry = f"retry-after: {RETRY_UNAVAILABLE_S}\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n{retry}"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _log(self, reason: str) -> None:
        """Log why a connection was ended, at most once in LOG_INTERVAL_S: there may be thousands."""
        now_s = self.loop.time()
        if now_s - BoundedProtocol._logged_s >= LOG_INTERVAL_S:
            BoundedProtocol._logged_s = now_s
            logger.warning("refused a connection: %s (said at most every %g s)", reason, LOG_INTERVAL_S)


_TOO_LARGE = (
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the head has more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers",
)
