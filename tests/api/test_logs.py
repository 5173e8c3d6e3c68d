"""What the API process logs of requests, and that each line of theirs names them."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pypto_serving.logs import JsonLines, TextLines, of_request
from pypto_serving.types.request import RequestFault
from tests.api.running import CHAT, COMPLETIONS, RunningServer
from tests.api.scripted_engine import WAIT_S, Script

ID = {"x-request-id": "mine-7"}
SECRET = "hello"


class Kept(logging.Handler):
    """Keeps lines as a process writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines("api"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def of(self, server: RunningServer) -> list[dict[str, Any]]:
        """The lines about requests, once none is in the server."""
        server.wait_idle()
        return [line for line in map(json.loads, self.lines) if "request_id" in line]


@pytest.fixture
def kept() -> Iterator[Kept]:
    logger, handler = logging.getLogger("pypto_serving.api"), Kept()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_a_request_is_logged_on_demand_without_its_prompt(start: Callable[..., RunningServer], kept: Kept) -> None:
    body = {"prompt": SECRET, "max_tokens": 5, "n": 2, "temperature": 0.5}
    silent = start()
    assert silent.http.post(COMPLETIONS, json=body, headers=ID).status_code == 200
    assert kept.of(silent) == []
    server = start(log_requests=True)
    answer = server.http.post(COMPLETIONS, json=body, headers=ID).json()
    (line,) = kept.of(server)
    assert (line["level"], line["process"], line["request_id"]) == ("info", "api", "mine-7")
    assert line["generation_id"] == answer["id"]
    assert (line["num_choices"], line["max_tokens"], line["temperature"]) == (2, 5, 0.5)
    assert line["finish_reasons"] == {"length": 2}
    assert line["output_tokens"] == answer["usage"]["completion_tokens"]
    assert {"queue_s", "prefill_s", "decode_s"} <= line.keys()
    assert SECRET not in "".join(kept.lines)
    assert "2 x length" in line["message"] and line["time"].endswith("Z")


def test_prompts_are_logged_as_far_as_asked(start: Callable[..., RunningServer], kept: Kept) -> None:
    server = start(log_requests=True, max_log_len=3)
    body = {"prompt": [SECRET, "again"], "max_tokens": 1}
    assert server.post(COMPLETIONS, body).status_code == 200
    (line,) = kept.of(server)
    assert line["prompts"] == ["hel", "aga"]
    assert SECRET not in line["message"] and "prompt 'hel'" in line["message"]
    kept.lines.clear()
    assert server.post(COMPLETIONS, {**body, "prompt": [SECRET] * 17}).status_code == 200
    (line,) = kept.of(server)
    assert line["prompts"] == ["hel"] * 16 and line["num_choices"] == 17


def test_the_access_log_has_a_line_for_each_answer(start: Callable[..., RunningServer], kept: Kept) -> None:
    server = start(access_log=True)
    server.http.get("/version?key=hidden", headers=ID)
    server.http.post(COMPLETIONS, json={"prompt": ""}, headers={"x-request-id": "bad"})
    first, second = kept.of(server)
    assert (first["method"], first["path"], first["status"], first["request_id"]) == ("GET", "/version", 200, "mine-7")
    assert first["client"].startswith("127.0.0.1:") and first["first_byte_ms"] >= 0
    assert (second["status"], second["request_id"]) == (400, "bad")
    assert "hidden" not in "".join(kept.lines)


def test_a_request_that_fails_is_named_in_log_and_answer(start: Callable[..., RunningServer], kept: Kept) -> None:
    server = start()

    def broken(_: object) -> Script:
        raise RuntimeError("deliberate")

    server.engine.script = broken
    answer = server.http.post(CHAT, json={"messages": [{"role": "user", "content": SECRET}]}, headers=ID)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-7")
    (line,) = kept.of(server)
    assert (line["level"], line["request_id"]) == ("error", "mine-7")
    assert "deliberate" in line["exception"] and "deliberate" not in line["message"]


def test_streams_and_their_errors_have_the_id(start: Callable[..., RunningServer], kept: Kept) -> None:
    server = start(log_requests=True)
    server.engine.script = lambda request: Script([], fault=RequestFault(500, "request_failed", "it failed"))
    body = {"prompt": SECRET, "stream": True}
    answer = server.http.post(COMPLETIONS, json=body, headers=ID)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine-7")
    assert "it failed" in answer.text
    assert {line["request_id"] for line in kept.of(server)} == {"mine-7"}
    assert all(request.http_id == "mine-7" for request in server.engine.requests)


@pytest.mark.parametrize(
    ("head", "status"), [(b"GET / HTTP/9.9\r\n", 400), (b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000 + b"\r\n", 431)]
)
def test_what_the_connection_refuses_has_an_id(server: RunningServer, head: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.sendall(head + b"\r\n")
        answer = connection.makefile("rb").read().lower()
    assert answer.startswith(b"http/1.1 %d" % status)
    assert answer.count(b"\r\nx-request-id: ") == 1


def test_a_body_that_is_too_large_is_refused_with_its_own_id(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nx-request-id: mine-8\r\ncontent-length: 999999999\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.makefile("rb").read().lower()
    assert answer.startswith(b"http/1.1 413") and b"\r\nx-request-id: mine-8\r\n" in answer


def test_lines_for_people_name_process_and_request() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, "row %d", (3,), None)
    assert TextLines("worker").format(record).endswith(" WARNING worker: row 3")
    record.__dict__.update(of_request("mine-9"))
    assert TextLines("worker").format(record).endswith(" WARNING worker [mine-9]: row 3")
