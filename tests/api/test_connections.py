"""A client without a key can cost the server only so much: heads, bodies, upgrades and connections are bounded."""

from __future__ import annotations

import json
import re
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from pypto_serving.api import connection, gate
from pypto_serving.api.gate import Places
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script

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


@pytest.fixture
def crowded(start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server with eight places and eight spare ones."""
    monkeypatch.setattr("pypto_serving.api.run.raise_file_limit", lambda: Places(8, 8))
    return start()


@contextmanager
def dialled(server: RunningServer) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))


def occupy(server: RunningServer, connect: Callable[[], socket.socket], count: int) -> list[socket.socket]:
    """Connections whose requests are being answered."""
    server.engine.script = lambda request: Script([], hang=True)
    before = len(server.engine.requests)
    clients = [connect() for _ in range(count)]
    for client in clients:
        client.sendall(HEAD + LENGTH + b"\r\n" + BODY)
    server.engine.wait_for(lambda: len(server.engine.requests) == before + count)
    return clients


def test_surplus_connections_are_refused_and_health_is_still_answered(crowded: RunningServer) -> None:
    with dialled(crowded) as connect:
        occupied = occupy(crowded, connect, 8)
        late = connect()
        late.sendall(HEAD + LENGTH + b"\r\n" + BODY)
        status, data = answer(late)
        assert status == 503 and b"retry-after: 5" in data and b"too many connections" in data
        healthier = connect()
        healthier.sendall(b"GET /healthier HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(healthier)[0] == 503
        for url in (b"/health", b"/health?probe=1"):
            healthy = connect()
            healthy.sendall(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % url)
            assert answer(healthy)[0] == 200
        crowded.call(crowded.engine.finish_hanging)
        assert b"HTTP/1.1 200" in occupied[0].recv(4096)
        occupied[0].sendall(b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer(occupied[0])[0] == 200, "a connection that has a place keeps it"


def test_newcomers_beyond_the_spare_places_are_told_so(
    crowded: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with dialled(crowded) as connect:
        occupy(crowded, connect, 8)
        late = [connect() for _ in range(30)]
        assert [answer(client)[0] for client in late[:-8]] == [503] * 22
        for client in late[-8:]:
            client.sendall(HEAD + LENGTH + b"\r\n" + BODY)
            assert answer(client)[0] == 503
        crowded.call(crowded.engine.finish_hanging)
    assert 'http_responses_total{model_name="tiny",status="503"} 30.0' in crowded.service.metrics.render().decode()
    told = [message for message in caplog.messages if "too many connections" in message]
    assert len(told) == 1


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"content-length: 9\r\n\r\n{"], ids=["nothing", "a head", "a body"])
def test_clients_that_hang_lose_their_places_to_newcomers(
    crowded: RunningServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(gate, "SILENCE_S", 0.0)
    with dialled(crowded) as connect:
        hanging = [connect() for _ in range(8)]
        for client in hanging:
            client.sendall(sent)
        for number in range(12):
            client = connect()
            client.sendall(HEAD + LENGTH + b"connection: close\r\n\r\n" + BODY)
            assert answer(client)[0] == 200, number
        ended, _, _ = select.select(hanging, [], [], WAIT_S)
        assert {answer(client)[0] for client in ended} <= ({503, 0} if sent else {0})


def test_unfinished_bodies_are_bounded_together(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MIN_HELD_BYTES", 0)
    server = start(max_body_bytes=1_000_000)
    held = server.server._gate._held
    with dialled(server) as connect:
        large = [connect() for _ in range(6)]
        for client in large:
            client.sendall(HEAD + b"content-length: 900000\r\n\r\n" + b" " * 890_000)
            while not server.call(lambda: held and [*held.values()][-1] > 890_000):
                pass
        told = [answer(client)[0] for client in large[:4]]
        assert told == [503] * 4
        assert server.post("/v1/completions", json.loads(BODY)).status_code == 200
        for client in large[4:]:
            client.sendall(b" " * (10_000 - len(BODY)) + BODY)
            assert client.recv(12) == b"HTTP/1.1 200"
    assert server.server._gate._num_held == 0


def test_a_body_that_was_parsed_is_held_no_more(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.engine.script = lambda request: Script([], hang=True)
    with dialled(server) as connect:
        client = connect()
        client.sendall(HEAD + LENGTH + b"\r\n" + BODY[:5])
        while server.call(lambda: server.server._gate._num_held) < 5:
            pass
        client.sendall(BODY[5:])
        server.engine.wait_for(lambda: bool(server.engine.requests))
        assert server.server._gate._num_held == 0
        server.call(server.engine.finish_hanging)
        assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize("length", [10 << 30, 100_001])
def test_a_large_body_is_refused_before_it_is_sent(
    server: RunningServer, connect: Callable[[], socket.socket], length: int
) -> None:
    client = connect()
    client.sendall(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % length)
    status, data = answer(client)
    assert status == 413 and b"request_too_large" in data and b"100 Continue" not in data


def test_a_body_that_may_be_sent_is_asked_for(connect: Callable[[], socket.socket]) -> None:
    client = connect()
    client.sendall(HEAD + LENGTH + b"expect: 100-continue\r\nconnection: close\r\n\r\n")
    assert client.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.sendall(BODY)
    assert answer(client)[0] == 200


def test_a_client_that_was_refused_need_not_send_its_body(
    start: Callable[..., RunningServer],
) -> None:
    with dialled(start(api_key="secret")) as connect:
        client = connect()
        client.sendall(HEAD + LENGTH + b"expect: 100-continue\r\n\r\n")
        assert answer(client)[0] == 401


@pytest.mark.parametrize("stream", [False, True])
def test_answers_to_http_1_0_have_no_chunks(connect: Callable[[], socket.socket], stream: bool) -> None:
    client = connect()
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": stream}).encode()
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"connection: keep-alive\r\n"
    client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    status, data = answer(client)
    fields, _, text = data.partition(b"\r\n\r\n")
    assert status == 200 and b"transfer-encoding" not in fields and b"connection: close" in fields
    if stream:
        assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(text)["object"] == "text_completion"


def test_pipelined_requests_are_answered_in_order_up_to_a_bound(connect: Callable[[], socket.socket]) -> None:
    one = b"GET /v1/models/m%d HTTP/1.1\r\nhost: x\r\n\r\n"
    client = connect()
    client.sendall(b"".join(one % i for i in range(connection.MAX_PIPELINED)))
    client.sendall((one % 99).replace(b"host: x", b"host: x\r\nconnection: close"))
    _, data = answer(client)
    asked = [int(i) for i in re.findall(rb"the model 'm(\d+)'", data)]
    assert asked == [*range(connection.MAX_PIPELINED), 99]


@pytest.mark.parametrize(
    ("more", "status"), [(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 1000, 429), (b"\0\0\0", 400)]
)
def test_requests_before_one_that_is_refused_are_answered(
    server: RunningServer, connect: Callable[[], socket.socket], more: bytes, status: int
) -> None:
    before, client = server.service.metrics._responses[status], connect()
    with suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(HEAD + LENGTH + b"\r\n" + BODY + more)
    statuses = [int(found) for found in re.findall(rb"HTTP/1.1 (\d+)", answer(client)[1])]
    assert len(statuses) > 1 and statuses == [200] * (len(statuses) - 1) + [status]
    assert server.service.metrics._responses[status] == before + 1


def test_a_disconnect_ends_the_first_of_pipelined_requests(
    server: RunningServer, connect: Callable[[], socket.socket]
) -> None:
    server.engine.script = lambda request: Script([], hang=True)
    client = connect()
    client.sendall((HEAD + LENGTH + b"\r\n" + BODY) * 3)
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    client.close()
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


@pytest.mark.parametrize(
    ("soft", "hard", "connections", "spare"),
    [
        (256, 4096, 3904, 64),
        (1024, 1024, 832, 64),
        (64, 64, 24, 8),
        (1024, -1, 16192, 64),
        (1 << 20, 1 << 20, 16192, 64),
    ],
)
def test_the_limit_of_files_is_raised(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, connections: int, spare: int
) -> None:
    limits: list[Any] = [(soft, hard)]
    monkeypatch.setattr(gate.resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(gate.resource, "setrlimit", lambda kind, given: limits.append(given))
    assert gate.raise_file_limit() == Places(connections, spare)
    assert limits[-1][0] >= min(gate.MAX_FILES, soft if hard == soft else limits[-1][0])
