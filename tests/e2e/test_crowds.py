"""Many clients at once, with few files and little memory for them: nobody is dropped silently."""

from __future__ import annotations

import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest

from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 8, "stream": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """At most 300 files can be open, so 108 connections are served and 64 more are told that they are too many."""
    program = ("sh", "-c", 'ulimit -n 300; exec "$@"', "sh", sys.executable, "-m", "pypto_serving")
    with Server("--backend", "null", "--log-level", "warning", program=program) as running:
        yield running


def connect(server: Server, stack: ExitStack) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", server.ready["port"]), timeout=60))


def test_clients_beyond_the_limit_of_files_are_told_and_counted(server: Server) -> None:
    with ExitStack() as stack:
        clients = [connect(server, stack) for _ in range(400)]
        for client in clients:
            with suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(HEAD % len(BODY) + BODY)
        found = Counter(client.recv(12) for client in clients)
    assert set(found) == {b"HTTP/1.1 200", b"HTTP/1.1 503"}
    assert found[b"HTTP/1.1 200"] >= 108
    responses = server.http.get("/metrics").text.splitlines()
    (refused,) = [float(line.split()[-1]) for line in responses if "http_responses_total{" in line and '"503"' in line]
    assert refused == found[b"HTTP/1.1 503"]


def test_unfinished_bodies_do_not_fill_the_memory(server: Server) -> None:
    api = psutil.Process(server.process.pid)
    before = api.memory_info().rss
    with ExitStack() as stack:
        for _ in range(12):
            with suppress(BrokenPipeError, ConnectionResetError):
                connect(server, stack).sendall(HEAD % 60_000_000 + b" " * 59_000_000)
            assert api.memory_info().rss - before < 400e6
        answer = server.http.post("/v1/completions", json={"prompt": [1], "max_tokens": 2})
        assert answer.status_code == 200
        assert server.http.get("/health").status_code == 200
