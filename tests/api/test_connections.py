"""A client without a key can cost the server only so much: heads, bodies, upgrades and connections are bounded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from pypto_serving.api import connection
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S

BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest.fixture
def connect(server: RunningServer) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))


def answer(client: socket.socket) -> tuple[int, bytes]:
    """The status and the rest of an answer after which the server closes; 0 if there is none."""
    data = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return int(data.split(b" ", 2)[1]) if data else 0, data


@pytest.mark.parametrize(
    "head",
    [b"a: %b\r\n" % (b"x" * (1 << 20)), b"a: b\r\n" * 20_000, b"x" * (1 << 20), b"a: b\r\n" * 200],
    ids=["one long header", "headers without end", "a name without end", "too many headers"],
)
def test_a_head_is_bounded(server: RunningServer, connect: Callable[[], socket.socket], head: bytes) -> None:
    client = connect()
    with suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(HEAD + head + LENGTH + b"\r\n" + BODY)
    assert answer(client)[0] in (431, 0), "0: the refusal was lost, since the client was still sending"
    assert server.http.get("/health").status_code == 200


def test_headers_up_to_the_bounds_are_served(connect: Callable[[], socket.socket]) -> None:
    client = connect()
    many = b"".join(b"x-%d: %b\r\n" % (i, b"y" * 400) for i in range(120))
    client.sendall(HEAD + many + LENGTH + b"connection: close\r\n\r\n" + BODY)
    assert answer(client)[0] == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1", HEAD + b"a: b\r\n"])
def test_a_head_that_does_not_end_is_given_up(
    connect: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    client = connect()
    client.sendall(sent)
    assert answer(client)[0] == (408 if sent else 0)


def test_a_body_that_does_not_end_is_given_up(
    connect: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_PATIENCE_S", 0.05)
    client = connect()
    client.sendall(HEAD + LENGTH + b"\r\n" + BODY[:-1])
    status, data = answer(client)
    assert status == 408 and b"slower than" in data


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_an_upgrade_to_http2_is_answered_in_http1(connect: Callable[[], socket.socket], pieces: int) -> None:
    """As `curl --http2` and Java's HttpClient ask."""
    client = connect()
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    data = HEAD + upgrade + LENGTH + b"\r\n" + BODY
    size = -(-len(data) // pieces)
    for i in range(0, len(data), size):
        client.sendall(data[i : i + size])
    again = HEAD + LENGTH + b"connection: close\r\n\r\n" + BODY
    client.sendall(again)
    status, found = answer(client)
    assert status == 200 and found.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
def test_what_is_no_request_gets_an_error(
    connect: Callable[[], socket.socket], data: bytes, status: int, server: RunningServer
) -> None:
    client = connect()
    client.sendall(data)
    found, text = answer(client)
    assert found == status
    assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_connections_are_bounded_and_health_is_still_answered(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pypto_serving.api.run.max_connections", lambda: 8)
    monkeypatch.setattr(connection, "SPARE_CONNECTIONS", 8)
    server = start()
    with ExitStack() as stack:

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))

        idle = [connected() for _ in range(8)]
        late = connected()
        late.sendall(HEAD + LENGTH + b"\r\n" + BODY)
        status, data = answer(late)
        assert status == 503 and b"retry-after" in data and b"too many connections" in data
        healthy = connected()
        healthy.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer(healthy)[0] == 200
        for client in idle:
            client.close()
    response = server.post("/v1/completions", json.loads(BODY))
    assert response.status_code == 200


def test_the_limit_of_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[Any] = [(256, 4096)]
    monkeypatch.setattr(connection.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(connection.resource, "setrlimit", lambda kind, given: limits.append(given))
    assert connection.max_connections() == 4096 - connection.FILES_FOR_OTHERS - connection.SPARE_CONNECTIONS
    assert limits[-1] == (4096, 4096)
