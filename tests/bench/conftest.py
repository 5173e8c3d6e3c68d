"""A real HTTP server in a thread that stands in for the server under test.

The model name of a request picks how the server behaves; see `Modes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

STREAM = [(b"content-type", b"text/event-stream")]
JSON = [(b"content-type", b"application/json")]


def sse(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def refusal(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "test"}}).encode()


class Exchange:
    """One request and the means to answer it."""

    def __init__(self, body: dict[str, Any], chat: bool, receive: Receive, send: Send) -> None:
        self.body, self.chat = body, chat
        self.receive, self._send = receive, send
        self.output_len = int(body.get("max_completion_tokens" if chat else "max_tokens", 1))

    async def start(self, status: int = 200, headers: list[tuple[bytes, bytes]] = STREAM) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def chunk(self, text: str, finish_reason: str | None = None) -> bytes:
        piece = {"delta": {"content": text}} if self.chat else {"text": text}
        return sse({"choices": [{"index": 0, **piece, "finish_reason": finish_reason}]})

    async def stream(self, *, usage: bool = True, cached: dict[str, Any] | None = None) -> None:
        """`output_len` chunks, the last of which finishes; then usage and [DONE]."""
        await self.start()
        if self.chat:
            await self.write(sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        for i in range(self.output_len):
            await self.write(self.chunk(f"t{i} ", "length" if i == self.output_len - 1 else None))
        if usage:
            tokens: dict[str, Any] = {"prompt_tokens": 7, "completion_tokens": self.output_len}
            if cached is not None:
                tokens |= {"prompt_tokens": len(self.body["prompt"]), "prompt_tokens_details": cached}
            await self.write(sse({"choices": [], "usage": tokens}))
        await self.write(b"data: [DONE]\n\n", more=False)


class Modes:
    """How to behave; one method per model name."""

    async def ok(self, x: Exchange) -> None:
        await x.stream()

    async def cached(self, x: Exchange) -> None:
        """A quarter of the prompt comes from the cache."""
        await x.stream(cached={"cached_tokens": len(x.body["prompt"]) // 4})

    async def not_cached(self, x: Exchange) -> None:
        await x.stream(cached={"cached_tokens": 0})

    async def whole(self, x: Exchange) -> None:
        """One reply with three tokens, not streamed."""
        assert "stream" not in x.body and "stream_options" not in x.body
        await x.start(200, JSON)
        piece = {"message": {"content": "abc"}} if x.chat else {"text": "abc"}
        usage = {"prompt_tokens": 8, "completion_tokens": 3}
        reply = json.dumps({"choices": [{"index": 0, **piece, "finish_reason": "length"}], "usage": usage}).encode()
        await x.write(reply[:10])
        await x.write(reply[10:], more=False)

    async def empty_whole(self, x: Exchange) -> None:
        await x.start(200, JSON)
        await x.write(b"{}", more=False)

    async def cached_in_tiers(self, x: Exchange) -> None:
        """A quarter comes from the device, a quarter from disk."""
        quarter = len(x.body["prompt"]) // 4
        tiers = {"device": quarter, "host": 0, "disk": quarter}
        await x.stream(cached={"cached_tokens": 2 * quarter, "cached_tokens_by_tier": tiers})

    async def no_usage(self, x: Exchange) -> None:
        await x.stream(usage=False)

    async def server_error(self, x: Exchange) -> None:
        await x.start(500, JSON)
        await x.write(refusal("the engine died"), more=False)

    async def busy(self, x: Exchange) -> None:
        await x.start(429, JSON)
        await x.write(refusal("queue full"), more=False)

    async def error_in_stream(self, x: Exchange) -> None:
        await x.start()
        await x.write(x.chunk("t0 "))
        await x.write(sse({"error": {"message": "lost the worker", "code": 500}}))
        await x.write(b"data: [DONE]\n\n", more=False)

    async def cut(self, x: Exchange) -> None:
        """Ends without the last HTTP chunk: uvicorn closes the connection."""
        await x.start()
        await x.write(x.chunk("t0 "))

    async def unfinished(self, x: Exchange) -> None:
        await x.start()
        await x.write(x.chunk("t0 "))
        await x.write(x.chunk("t1 "), more=False)

    async def not_a_stream(self, x: Exchange) -> None:
        await x.start(200, JSON)
        await x.write(json.dumps({"choices": [{"text": "whole"}]}).encode(), more=False)

    async def garbage(self, x: Exchange) -> None:
        await x.start()
        await x.write(b"data: {oops\n\ndata: [DONE]\n\n", more=False)

    async def hang(self, x: Exchange) -> None:
        """Never answers; leaves when the client does."""
        while (await x.receive())["type"] != "http.disconnect":
            pass

    async def slow(self, x: Exchange) -> None:
        """Yields to the event loop many times between chunks."""
        await x.start()
        for i in range(3):
            for _ in range(200):
                await asyncio.sleep(0)
            await x.write(x.chunk(f"t{i} ", "stop" if i == 2 else None), more=i < 2)


@dataclass
class Server:
    """The running server: its address and what it has seen."""

    port: int
    model_card: dict[str, Any] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[bytes, bytes]] = field(default_factory=list)
    in_flight: int = 0
    peak_in_flight: int = 0
    gate: int = 0
    """Requests of model `gated` are answered only once this many are in flight."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def reset(self) -> None:
        self.model_card = {"id": "ok", "vocab_size": 100}
        self.bodies, self.headers = [], []
        self.peak_in_flight = self.gate = 0
        self._opened = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        assert not scope["path"].startswith("/v1/v1")
        if scope["path"] == "/v1/models":
            await send({"type": "http.response.start", "status": 200, "headers": JSON})
            await send({"type": "http.response.body", "body": json.dumps({"data": [self.model_card]}).encode()})
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message["body"], message["more_body"]
        body = json.loads(raw)
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await self._answer(Exchange(body, "chat" in scope["path"], receive, send))
        finally:
            self.in_flight -= 1

    async def _answer(self, x: Exchange) -> None:
        model = x.body["model"]
        if model == "gated":
            if self.in_flight >= self.gate:
                self._opened.set()
            await self._opened.wait()
            model = "ok"
        elif model == "every_third_fails":
            model = "server_error" if len(self.bodies) % 3 == 0 else "ok"
        await getattr(Modes(), model)(x)


@pytest.fixture(scope="session")
def _running() -> Iterator[Server]:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        server = Server(listener.getsockname()[1])
        config = uvicorn.Config(server, lifespan="off", log_level="critical")
        process = uvicorn.Server(config)
        thread = threading.Thread(target=process.run, args=([listener],))
        thread.start()
        yield server
        process.should_exit = True
        thread.join()


@pytest.fixture
def server(_running: Server) -> Server:
    _running.reset()
    return _running
