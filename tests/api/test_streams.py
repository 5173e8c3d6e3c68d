"""Clients of streams that read slowly, stall or leave, over real sockets that hold little."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import IO

import pytest
from starlette.types import Message

from pypto_serving.api import run
from pypto_serving.api.common import respond
from pypto_serving.api.common.respond import pinging, send_part
from pypto_serving.api.text.tokenizer import Tokenizer
from pypto_serving.types.request import RequestFault
from tests.api.checkpoint import TEXT
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script

PATH = "/v1/completions"
PING = b": ping\n\n"
NUM_TOKENS = 6000
"""Many times what fits between a server and a client that does not read."""


@pytest.fixture
def narrow(start: Callable[..., RunningServer]) -> RunningServer:
    """A server that hands its sockets few bytes at once, and whose engine makes one output at a time."""
    server = start(config={"max_model_len": 2 * NUM_TOKENS})
    server.server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server.engine.largest_portion = 1
    return server


def stalled(server: RunningServer, script: Script) -> socket.socket:
    """A client that has read nothing when the engine has made every token."""
    server.engine.script = lambda request: script
    connection = server.raw_post(PATH, {"prompt": "hello", "stream": True, "max_tokens": NUM_TOKENS})
    server.engine.wait_for(lambda: server.engine.played == 1)
    return connection


def chunks_of(connection: socket.socket) -> list[bytes]:
    """The chunks of a response, each a write of the server."""
    with connection.makefile("rb") as response:
        assert response.readline() == b"HTTP/1.1 200 OK\r\n"
        while response.readline() != b"\r\n":
            pass
        return chunks_after_head(response)


def chunks_after_head(response: IO[bytes]) -> list[bytes]:
    chunks = []
    while size := int(response.readline(), 16):
        chunks.append(response.read(size))
        response.readline()
    return chunks


def test_a_client_that_stalls_loses_nothing_and_gets_the_rest_at_once(
    narrow: RunningServer, tokenizer: Tokenizer
) -> None:
    tokens = (tokenizer.encode(TEXT) * NUM_TOKENS)[:NUM_TOKENS]
    with stalled(narrow, Script(tokens)) as connection:
        chunks = chunks_of(connection)
    *events, done, rest = b"".join(chunks).split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    texts = [json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == tokenizer.decode(tokens)
    counts = [chunk.count(b"data: ") for chunk in chunks]
    assert counts.count(1) > len(chunks) - 5, "while the sockets take them, outputs leave one by one"
    assert max(counts) > 100, "what waited, more or less by how much the system's buffers take, leaves in one write"


def test_tokens_of_a_client_that_keeps_up_cost_no_message(
    server: RunningServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their chunks are written at once, also between pings."""
    sent: list[object] = []
    monkeypatch.setattr(respond, "send_part", lambda *part: sent.append(part) or send_part(*part))  # type: ignore[func-returns-value]
    monkeypatch.setattr(server.engine, "largest_portion", 1)
    server.engine.script = lambda request: Script((tokenizer.encode(TEXT) * 9)[:300])
    body, texts = {"prompt": "hello", "max_tokens": 300}, []
    for more in ({}, {"sse_ping_interval": 60}):
        events = server.events(PATH, body | more)
        texts.append("".join(event["choices"][0]["text"] for event in events))
        assert len(events) > 20 and not sent
    assert texts[0] == texts[1]


def test_a_client_that_leaves_while_it_stalls_frees_its_request(narrow: RunningServer, tokenizer: Tokenizer) -> None:
    tokens = (tokenizer.encode(TEXT) * NUM_TOKENS)[:NUM_TOKENS]
    stalled(narrow, Script(tokens, hang=True)).close()
    narrow.engine.wait_for(lambda: len(narrow.engine.aborted) == 1)
    narrow.wait_idle()


def test_a_client_that_stalls_for_good_is_cut_off(
    start: Callable[..., RunningServer], tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pypto_serving.api.http.listening.READ_TIMEOUT_S", 0.5)
    server = start(config={"max_model_len": 100_000})
    server.engine.script = lambda request: Script((tokenizer.encode(TEXT) * 50_000)[:50_000], hang=True)
    with server.raw_post(PATH, {"prompt": "hello", "stream": True, "max_tokens": 50_000}):
        server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


def test_a_client_that_stalls_when_the_server_ends_is_cut_off(
    narrow: RunningServer, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "CLOSE_TIMEOUT_S", 0.1)
    tokens = (tokenizer.encode(TEXT) * NUM_TOKENS)[:NUM_TOKENS]
    with stalled(narrow, Script(tokens)):
        for _ in range(2):
            narrow.call(narrow.server.stop)
        narrow.thread.join(WAIT_S)
        assert not narrow.thread.is_alive()
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in said] == [
        "ending now, with a 503 for 1 request",
        "cut 1 connection, where the client took no data for 0.1 s",
    ]
    assert not any(record.exc_info for record in said)


def test_a_fault_while_a_client_stalls_reaches_it(narrow: RunningServer, tokenizer: Tokenizer) -> None:
    fault = RequestFault(500, "request_failed", "three workers died")
    with stalled(narrow, Script((tokenizer.encode(TEXT) * NUM_TOKENS)[:NUM_TOKENS], fault=fault)) as connection:
        last = chunks_of(connection)[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "three workers died"


def test_the_status_line_does_not_wait_for_the_first_token(server: RunningServer) -> None:
    server.engine.script = lambda request: Script([], hang=True)
    with server.raw_post(PATH, {"prompt": "hello", "stream": True}) as connection:
        head = connection.recv(4096)
        assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\ncontent-type: text/event-stream" in head
        assert head.endswith(b"\r\n\r\n"), "clients take a chunk for the first token"
        server.call(server.engine.finish_hanging)
        assert b"[DONE]" in b"".join(chunks_after_head(connection.makefile("rb")))


def test_silent_streams_are_pinged_on_request(server: RunningServer) -> None:
    server.engine.script = lambda request: Script([], hang=True)
    with server.raw_post(PATH, {"prompt": "hello", "stream": True, "sse_ping_interval": 1}) as connection:
        assert connection.recv(4096).endswith(b"\r\n\r\n")
        assert connection.recv(4096) == b"8\r\n: ping\n\n\r\n"
        server.call(server.engine.finish_hanging)
        assert b"[DONE]" in b"".join(chunks_after_head(connection.makefile("rb")))


def test_pings_fill_silences_only() -> None:
    async def main() -> None:
        written: list[bytes] = []
        pinged = asyncio.Event()

        async def write(message: Message) -> None:
            written.append(message["body"])
            if message["body"] == PING:
                pinged.set()

        async with pinging(write, lambda: PING, 0.05) as note_write:
            await pinged.wait()
            pinged.clear()
            note_write()
            await send_part(write, b"token")
            await pinged.wait()
        assert written == [PING, b"token", PING]

    asyncio.run(main())


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_events_have_one_line_each(start: Callable[..., RunningServer], chat: bool, logprobs: bool) -> None:
    """Whatever a client takes for the end of a line, as Python's splitlines does U+0085, U+2028 and U+2029."""
    server = start(served_model_names=("m\u2028",))
    said = "a\u2028b\u2029c\x85d\r\x0b\x1ce"
    tokens = server.service.tokenizer.encode(said)
    server.engine.script = lambda request: Script(tokens)
    path = "/v1/chat/completions" if chat else PATH
    wants = ({"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}) if logprobs else {}
    body = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
    response = server.post(path, {**body, **wants, "max_tokens": 99, "stream": True})
    *lines, done = [line for line in response.text.splitlines() if line]
    assert done == "data: [DONE]" and len(lines) == response.text.count("data: ") - 1
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(c["delta"].get("content", "") if chat else c["text"] for c in choices) == said
