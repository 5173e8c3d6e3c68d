"""Requests in bytes, and connections to send them over."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse

from tests.api.running import RunningServer
from tests.api.scripted_engine import WAIT_S

BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)


def answer(client: socket.socket) -> tuple[int, bytes]:
    """The status and the rest of an answer after which the server closes; 0 if there is none."""
    data = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65536):
            data += part
    return int(data.split(b" ", 2)[1]) if data else 0, data


def next_answer(client: socket.socket) -> int:
    """The status of an answer of known length, which was read whole."""
    response = HTTPResponse(client)
    response.begin()
    response.read()
    return response.status


@contextmanager
def dialled(server: RunningServer) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S))


def held(server: RunningServer) -> int:
    return server.server._gate._num_held


def padded(size: int) -> bytes:
    """A request whose body has `size` bytes."""
    return HEAD + b"content-length: %d\r\n\r\n" % size + BODY.ljust(size)
