"""Connections have places, and what they hold in memory is bounded."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Iterator

import pytest

from pypto_serving.api import run
from pypto_serving.api.http import gate
from pypto_serving.api.http.gate import QUIET_S, ConnectionPlaces, Gate, RefusalLog
from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script
from tests.api.sockets import BODY, HEAD, LENGTH, answer, dialled, held, padded
from tests.clock import VirtualClock


@pytest.fixture
def crowded(start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch) -> RunningServer:
    """A server with eight places and eight spare ones."""
    monkeypatch.setattr("pypto_serving.api.run.places", lambda file_limit: ConnectionPlaces(8, 8))
    return start()


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
    assert told == [f"refused 1 request with a 503: {gate.NO_PLACE} (said at most every 10 s)"]


def test_refusals_are_logged_by_reason_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    refusals = RefusalLog(clock)
    for _ in range(400):
        refusals.note(503, gate.NO_PLACE)
        refusals.note(408, "too slow")
    clock.advance(QUIET_S)
    refusals.note(503, gate.NO_PLACE)
    refusals.note(503, gate.NO_PLACE)
    clock.advance(QUIET_S)
    refusals.note(503, gate.NO_PLACE)
    told = [message.partition(":")[0] for message in caplog.messages]
    assert told == [
        f"refused {said}"
        for said in ("1 request with a 503", "1 request with a 408", "400 requests with a 503", "2 requests with a 503")
    ]


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


def test_unfinished_bodies_are_bounded_together_and_the_largest_give_way(
    start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MIN_HELD_BYTES", 0)
    server = start(max_body_bytes=1_000_000)
    with dialled(server) as connect:
        small = connect()
        small.sendall(HEAD + b"content-length: 100000\r\n\r\n" + b" " * 90_000)
        server.wait_for(lambda: held(server) > 90_000)
        large = [connect() for _ in range(6)]
        for client in large:
            client.sendall(HEAD + b"content-length: 900000\r\n\r\n" + b" " * 890_000)
        for _ in range(4):
            ended, _, _ = select.select(large, [], [], WAIT_S)
            assert answer(ended[0])[0] == 503
            large.remove(ended[0])
        small.sendall(b" " * (10_000 - len(BODY)) + BODY)
        assert small.recv(12) == b"HTTP/1.1 200"
    server.wait_for(lambda: held(server) == 0)


@pytest.fixture
def unread(start: Callable[..., RunningServer], monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server whose readers are busy until the test ends. Unfinished requests may hold 200,000 bytes."""
    monkeypatch.setattr(gate, "MIN_HELD_BYTES", 0)
    monkeypatch.setattr(run, "CLOSE_TIMEOUT_S", 0.1)
    server = start(max_body_bytes=100_000)
    queues = server.app.state.reading._reader.queues.values()
    for queue in queues:
        asyncio.run_coroutine_threadsafe(queue.take_turn("busy"), server.loop).result(WAIT_S)
    yield server
    for queue in queues:
        if server.thread.is_alive():
            server.call(queue.end_turn)


def test_a_body_counts_until_it_is_parsed_also_if_it_came_at_once(unread: RunningServer) -> None:
    with dialled(unread) as connect:
        client = connect()
        client.sendall(padded(30_000))
        unread.wait_for(lambda: held(unread) > 30_000)
        before = held(unread)
        client.sendall(b"GET /health HTT")
        unread.wait_for(lambda: held(unread) > before)
        client.close()
        unread.wait_for(lambda: held(unread) == 0)


def test_small_requests_pass_beside_large_bodies_that_wait_to_be_read(unread: RunningServer) -> None:
    with dialled(unread) as connect:
        waiting = [connect() for _ in range(2)]
        for client in waiting:
            client.sendall(padded(99_000))
        unread.wait_for(lambda: held(unread) > 198_000)
        for size in (70_000, 99_000):
            late = connect()
            late.sendall(padded(size))
            assert answer(late)[0] == 503
        small = connect()
        small.sendall(HEAD + LENGTH + b"\r\n" + BODY[:5])
        unread.wait_for(lambda: len(unread.server._gate._sending) == 1)
        small.sendall(BODY[5:])
        assert small.recv(12) == b"HTTP/1.1 200"
        assert not select.select(waiting, [], [], 0)[0]


def test_small_requests_have_a_bound_of_their_own(unread: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "SMALL_ROOM_BYTES", 0)
    with dialled(unread) as connect:
        clients = [connect() for _ in range(8)]
        for client in clients:
            client.sendall(padded(60_000)[:50_000])
        for _ in range(4):
            ended, _, _ = select.select(clients, [], [], WAIT_S)
            assert ended and answer(ended[0])[0] == 503
            clients.remove(ended[0])
        assert held(unread) <= 200_000


def test_a_body_that_was_parsed_is_held_no_more(start: Callable[..., RunningServer]) -> None:
    server = start()
    server.engine.script = lambda request: Script([], hang=True)
    with dialled(server) as connect:
        client = connect()
        client.sendall(HEAD + LENGTH + b"\r\n" + BODY[:5])
        server.wait_for(lambda: held(server) > 5)
        client.sendall(BODY[5:])
        server.engine.wait_for(lambda: bool(server.engine.requests))
        assert held(server) == 0
        server.call(server.engine.finish_hanging)
        assert client.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    ("files", "connections", "spare"),
    [(4096, 3904, 64), (1024, 832, 64), (64, 24, 8), (-1, 16192, 64), (1 << 20, 16192, 64)],
)
def test_places_fit_under_the_limit_of_files(files: int, connections: int, spare: int) -> None:
    assert gate.places(files) == ConnectionPlaces(connections, spare)


def test_a_request_that_waits_to_be_read_is_told_of_the_end(
    unread: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with dialled(unread) as connect:
        client = connect()
        client.sendall(padded(30_000))
        unread.wait_for(lambda: held(unread) > 30_000)
        unread.call(unread.server.stop)
        status, data = answer(client)
        assert status == 503 and b"shutting down" in data and b"x-request-id" in data
        unread.thread.join(WAIT_S)
    assert not [record for record in caplog.records if record.exc_info]


class Client:
    """A connection as the gate sees it."""

    ended = False

    def close_idle(self) -> None:
        self.ended = True

    def refuse_busy(self, reason: str) -> None:
        self.ended = True


@pytest.mark.parametrize("piece_bytes", [0, 1, gate.SIGN_BYTES // 4, gate.SIGN_BYTES])
def test_a_client_that_drips_gives_way_and_one_that_sends_does_not(piece_bytes: int) -> None:
    clock, sending, newcomer = VirtualClock(), Client(), Client()
    doorman = Gate(ConnectionPlaces(1, 1), 1000, clock, lambda status, message: None)
    assert doorman.enter(sending)
    for number in range(4):
        doorman.sending(sending, number * piece_bytes)
        clock.advance(gate.SILENCE_S / 2)
    assert doorman.enter(newcomer) is sending.ended is (piece_bytes < gate.SIGN_BYTES)


def test_of_clients_that_send_the_one_that_was_silent_longest_gives_way() -> None:
    clock, clients = VirtualClock(), [Client() for _ in range(4)]
    doorman = Gate(ConnectionPlaces(3, 1), 1000, clock, lambda status, message: None)
    for client in clients[:3]:
        assert doorman.enter(client)
        doorman.sending(client, 0)
        clock.advance(gate.SILENCE_S / 4)
    doorman.sending(clients[0], gate.SIGN_BYTES)
    clock.advance(gate.SILENCE_S)
    assert doorman.enter(clients[3])
    assert [client.ended for client in clients] == [False, True, False, False]
