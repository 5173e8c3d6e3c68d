"""A client without a key can cost the server only so much: heads, bodies, upgrades and pipelines are bounded."""

from __future__ import annotations

import json
import re
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from pypto_serving.api import run
from pypto_serving.api.http import connection
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script
from tests.api.sockets import BODY, HEAD, LENGTH, answer, dialled, held, next_answer, padded


@pytest.fixture
def connect(server: RunningServer) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))


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


@pytest.mark.parametrize("begun", [b"", b"transfer-encoding: chunked\r\n\r\n0\r\n"], ids=["headers", "trailers"])
@pytest.mark.parametrize("lines", [b"a:b\r\n" * 200, b"a:%b\r\n" % (b"x" * (40 << 10)) * 3, b"a:" + b"x" * (1 << 20)])
def test_headers_and_trailers_are_bounded_before_they_end(
    connect: Callable[[], socket.socket], begun: bytes, lines: bytes
) -> None:
    client = connect()
    with suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(HEAD + begun + lines)
    assert answer(client)[0] in (431, 0)


def test_trailers_after_an_answer_end_the_connection(start: Callable[..., RunningServer]) -> None:
    with dialled(start(api_keys=("secret",))) as connect:
        client = connect()
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        assert next_answer(client) == 401
        client.sendall(b"0\r\n" + b"a:b\r\n" * 200)
        assert client.recv(1) == b""


def test_trailers_are_no_headers(start: Callable[..., RunningServer]) -> None:
    server = start()
    with dialled(server) as connect:
        client = connect()
        chunks = b"%x\r\n%b\r\n0\r\nx-request-id: late\r\n\r\n" % (len(BODY), BODY)
        client.sendall(HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n" + chunks)
        status, data = answer(client)
        assert status == 200 and b"late" not in data


def test_a_body_comes_in_few_small_chunks_or_in_many_that_are_not_small(start: Callable[..., RunningServer]) -> None:
    chunked = HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    small, large = b"1\r\n \r\n", b"50\r\n" + b" " * 80 + b"\r\n"
    with dialled(start(max_body_bytes=4 << 20)) as connect:
        for chunks in (small * (connection.FREE_PIECES - 2), large * (connection.FREE_PIECES + 9)):
            client = connect()
            client.sendall(chunked + chunks + body)
            assert answer(client)[0] == 200
        client = connect()
        with suppress(BrokenPipeError, ConnectionResetError):
            client.sendall(chunked + small * (connection.FREE_PIECES + 1))
        status, data = answer(client)
        assert status == 400 and b"send larger ones" in data


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
def test_an_upgrade_to_http2_is_answered_in_http1(
    server: RunningServer, connect: Callable[[], socket.socket], pieces: int
) -> None:
    """As `curl --http2` and Java's HttpClient ask."""
    client = connect()
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    data = HEAD + upgrade + LENGTH + b"\r\n" + BODY
    size = -(-len(data) // pieces)
    for i in range(0, len(data), size):
        client.sendall(data[i : i + size])
    assert next_answer(client) == 200
    assert held(server) == 0
    client.sendall(HEAD + LENGTH + b"connection: close\r\n\r\n" + BODY)
    assert answer(client)[0] == 200


def test_an_upgrade_keeps_the_version_and_the_end_of_the_connection(connect: Callable[[], socket.socket]) -> None:
    upgrade = b"connection: close, Upgrade\r\nupgrade: h2c\r\n"
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": True}).encode()
    rest = upgrade + b"content-length: %d\r\n\r\n" % len(body) + body
    for head in (HEAD, HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")):
        client = connect()
        client.sendall(head + rest)
        status, data = answer(client)
        assert status == 200 and b"connection: close" in data
        assert (b"transfer-encoding: chunked" in data) == (head is HEAD)


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
def guarded(start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server with a key, whose connections are soon closed when idle."""
    monkeypatch.setattr(run, "KEEP_ALIVE_S", 0.1)
    return start(api_keys=("secret",))


@pytest.mark.parametrize(
    ("kind", "piece"), [(b"content-length: 99999", b"{"), (b"transfer-encoding: chunked", b"1\r\n{\r\n")]
)
def test_a_client_that_was_refused_does_not_keep_its_place_by_its_body(
    guarded: RunningServer, kind: bytes, piece: bytes
) -> None:
    with dialled(guarded) as connect:
        client = connect()
        client.sendall(HEAD + kind + b"\r\n\r\n")
        assert next_answer(client) == 401
        guarded.wait_for(lambda: not guarded.server._gate._sending)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(int(WAIT_S / 0.02)):
                if select.select([client], [], [], 0.02)[0] and not client.recv(4096):
                    return
                client.sendall(piece)
            pytest.fail("the connection was kept")


def test_a_body_may_end_after_its_answer(start: Callable[..., RunningServer]) -> None:
    with dialled(start(api_keys=("secret",))) as connect:
        client = connect()
        client.sendall(HEAD + LENGTH + b"\r\n")
        assert next_answer(client) == 401
        client.sendall(BODY)
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert answer(client)[0] == 200


def test_line_ends_after_a_request_do_not_keep_its_connection(guarded: RunningServer) -> None:
    with dialled(guarded) as connect:
        client = connect()
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert next_answer(client) == 200
        client.sendall(b"\r\n")
        assert client.recv(1) == b""


def test_a_slow_head_outlives_the_answer_before(guarded: RunningServer) -> None:
    """The connection is not idle, so it is kept longer than idle ones are."""
    ask = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    with dialled(guarded) as connect:
        slow, idle = connect(), connect()
        slow.sendall(ask + b"\r\n" + ask)
        assert next_answer(slow) == 200
        idle.sendall(ask + b"\r\n")
        assert answer(idle)[0] == 200, "closed since it was idle"
        slow.sendall(b"connection: close\r\n\r\n")
        assert answer(slow)[0] == 200


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
    with dialled(start(api_keys=("secret",))) as connect:
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


def test_a_late_body_leaves_the_answer_before_it_whole(
    server: RunningServer, connect: Callable[[], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "BODY_PATIENCE_S", 0.05)
    server.engine.script = lambda request: Script([], hang=True)
    before, client = server.service.metrics._responses[408], connect()
    client.sendall(HEAD + LENGTH + b"\r\n" + BODY + HEAD + LENGTH + b"\r\n")
    server.wait_for(lambda: server.service.metrics._responses[408] > before)
    server.call(server.engine.finish_hanging)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer(client)[1]) == [b"200", b"408"]


@pytest.mark.parametrize(
    ("at_once", "later"),
    [(1, 2 * (HEAD + LENGTH + b"\r\n" + BODY)), (3, b""), (1, padded(95_000)[:90_000])],
    ids=["whole ones", "all at once", "a part of a large one"],
)
def test_a_disconnect_ends_the_first_of_pipelined_requests(
    server: RunningServer, connect: Callable[[], socket.socket], at_once: int, later: bytes
) -> None:
    server.engine.script = lambda request: Script([], hang=True)
    client = connect()
    client.sendall((HEAD + LENGTH + b"\r\n" + BODY) * at_once)
    server.engine.wait_for(lambda: len(server.engine.requests) == 1)
    client.sendall(later)
    client.close()
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)


@pytest.mark.parametrize("sent", [20, -5], ids=["a head", "a body"])
def test_an_unfinished_request_is_told_of_the_end(
    start: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture, sent: int
) -> None:
    server = start()
    with dialled(server) as connect:
        client = connect()
        client.sendall((HEAD + LENGTH + b"\r\n" + BODY)[:sent])
        server.wait_for(lambda: bool(server.server._gate._sending))
        server.call(server.server.stop)
        status, data = answer(client)
        assert status == 503 and b"shutting down" in data and b"retry-after: 5" in data
    server.thread.join(WAIT_S)
    assert server.service.metrics._responses[503] == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
