"""A lean HTTP/1.1 client over keep-alive connections, so that the client's own cost does not distort results.

The event loop's read callback passes bytes to the caller's sink, without a queue or a task switch per chunk.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

import httptools

from pypto_serving.types.server_url import ServerUrl

Sink = Callable[[int, bytes], None]
"""Receives (HTTP status, piece of the body) for each piece that arrives."""


class Connection(asyncio.Protocol):
    """One connection, owned by `HttpClient`. Handles one exchange at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.status = 0
        self._done: asyncio.Future[int] | None = None

    def start(self, request: bytes, sink: Sink) -> asyncio.Future[int]:
        """Write `request`. The returned future yields the status once `sink` has the whole reply."""
        self.status = 0
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self._done

    @property
    def reusable(self) -> bool:
        return not self.transport.is_closing() and self._parser.should_keep_alive()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.transport.abort()
            if not self._done.done():
                self._done.set_exception(ConnectionError(f"the reply is not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the body at an orderly end after the headers. The sink decides whether the body was complete."""
        if self._done is None or self._done.done():
            return
        if exc is None and self.status:
            self._done.set_result(self.status)
        else:
            self._done.set_exception(ConnectionError(str(exc or "the server closed the connection without a reply")))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._sink(self.status, body)

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self.status)


class HttpClient:
    """A client for one origin. Owns its connections, and opens one more whenever all are busy."""

    def __init__(self, url: ServerUrl, headers: dict[str, str]) -> None:
        self._url = url
        self._tls = ssl.create_default_context() if url.tls else None
        self._head = "".join(f"{k}: {v}\r\n" for k, v in {"Host": url.netloc, **headers}.items())
        self._idle: list[Connection] = []

    def encode(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Encode a request for `exchange`."""
        head = f"{method} {self._url.target(path)} HTTP/1.1\r\n{self._head}"
        if body:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return head.encode() + b"\r\n" + body

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send `request`, pass the reply to `sink`, and return the status. Raises OSError.

        If the server closed a kept-alive connection before replying, open another and send the request again.
        """
        while True:
            kept = self._take_idle()
            connection = kept or await self._connect()
            try:
                status = await connection.start(request, sink)
            except BaseException as error:
                connection.transport.abort()
                if kept and not connection.status and isinstance(error, OSError):
                    continue
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.transport.close()
            return status

    def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.close()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.transport.is_closing():
                return connection
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, self._url.host, self._url.port, ssl=self._tls)
        return connection
