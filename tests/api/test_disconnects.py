"""Clients that leave at any byte of a request, or of its answer, leave nothing behind."""

from __future__ import annotations

import json
import socket
import struct

import pytest

from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S, Script
from tests.api.sockets import HEAD

RESET = struct.pack("ii", 1, 0)
"""Closing such a socket resets the connection."""


def request(stream: bool) -> bytes:
    body = json.dumps({"prompt": "hello", "max_tokens": 2, "stream": stream}).encode()
    return HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def leave(client: socket.socket, politely: bool) -> None:
    if not politely:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    client.close()


def nothing_is_left(server: RunningServer) -> bool:
    """Whether no connection has a place or bytes, and no request is admitted. The server's own client made none."""
    gate = server.server._gate
    places = [gate._served, gate._surplus, gate._idle, gate._sending, gate._held, gate._large]
    return not any(places) and gate._num_held == 0 and server.service.admission.in_flight == 0


@pytest.mark.parametrize("politely", [True, False], ids=["closes", "resets"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_leave_after_every_byte_of_a_request(server: RunningServer, stream: bool, politely: bool) -> None:
    """Only a whole request reaches the engine, where it is aborted."""
    server.engine.script = lambda request: Script([1], hang=True)
    data, before = request(stream), len(server.engine.submissions)
    for cut in range(len(data) + 1):
        client = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        client.sendall(data[:cut])
        if cut == len(data):
            server.engine.wait_for(lambda: len(server.engine.requests) == 1)
        leave(client, politely)
    server.engine.wait_for(lambda: len(server.engine.aborted) == 1)
    server.wait_for(lambda: nothing_is_left(server))
    (submission,) = server.engine.submissions[before:]
    assert not submission.hanging and not submission.waiting


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_leave_at_any_place_of_an_answer(server: RunningServer, stream: bool) -> None:
    ids = iter(range(1_000_000))

    def part(length: int | None) -> bytes:
        """Ask, read so much of the answer, or all, and leave."""
        with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as client:
            client.sendall(request(stream).replace(b"host: x", b"host: x%d\r\nconnection: close" % next(ids)))
            with client.makefile("rb") as answer:
                found = answer.read(length)
            leave(client, politely=length is None)
        return found

    whole = part(None)
    assert whole.startswith(b"HTTP/1.1 200")
    assert whole.rstrip().endswith(b"data: [DONE]\n\n\r\n0" if stream else b"}")
    for cut in range(0, len(whole), 23):
        assert len(part(cut)) == cut
    server.wait_for(lambda: nothing_is_left(server))
    assert all(not (each.hanging or any(each.waiting.values())) for each in server.engine.submissions)
    assert abs(len(part(None)) - len(whole)) < 8, "as long as before, but for the digits of the time"
