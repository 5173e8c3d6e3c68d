"""The chat loop, its HTTP client against a small real server, and whole conversations through pipes."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Generator, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import typer

from pypto_serving.api.chat.parsers.scanner import TextPart
from pypto_serving.cli import main
from pypto_serving.cli.chat import Conversation, Message
from pypto_serving.cli.client import ChatClient, ChatServerError

SYSTEM = {"role": "system", "content": "Be brief."}


class Script:
    """Lines that a user types; an exception stands for a key."""

    def __init__(self, *lines: str | BaseException) -> None:
        self._lines = iter((*lines, EOFError()))

    def __call__(self) -> str:
        line = next(self._lines)
        if isinstance(line, BaseException):
            raise line
        return line


def echo(messages: Sequence[Message]) -> Generator[TextPart]:
    """Answers the last message, and tells how many there are."""
    yield TextPart("content", f"{messages[-1]['content']}!")
    yield TextPart("content", f" {len(messages)}")


def test_thoughts_are_shown_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    def thoughtful(messages: Sequence[Message]) -> Generator[TextPart]:
        yield TextPart("reasoning", "let me ")
        yield TextPart("reasoning", "see")
        yield from echo(messages)

    chat = Conversation(thoughtful, [], Script("one\n"))
    chat.run("model")
    shown = capsys.readouterr()
    assert shown.out == "one! 1\n" and "let me see" in shown.err
    assert chat.messages[-1] == {"role": "assistant", "content": "one! 1"}


def test_turns_accumulate_and_clear_forgets(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Conversation(echo, [SYSTEM], Script("one\n", "", "two\n", "/clear\n", "three\n"))
    chat.run("model")
    assert capsys.readouterr().out == "one! 2\ntwo! 4\nthree! 2\n"
    assert [m["content"] for m in chat.messages] == ["Be brief.", "three", "three! 2"]


def test_exit_leaves_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    Conversation(echo, [], Script("/exit", "one")).run("model")
    assert capsys.readouterr().out == ""


def test_unknown_commands_are_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    chat = Conversation(echo, [], Script("/help"))
    chat.run("model")
    assert "/exit             leave" in capsys.readouterr().err
    assert chat.messages == []


def test_an_interrupt_stops_the_answer_and_keeps_what_came(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def interrupted(messages: Sequence[Message]) -> Generator[TextPart]:
        try:
            yield TextPart("content", "half")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    chat = Conversation(interrupted, [], Script("one"))
    chat.run("model")
    assert capsys.readouterr().out == "half\n"
    assert chat.messages[-1] == {"role": "assistant", "content": "half"}
    assert closed


def test_a_refused_turn_is_forgotten() -> None:
    def refused(messages: Sequence[Message]) -> Generator[TextPart]:
        raise ChatServerError("too long")
        yield TextPart("content", "")

    chat = Conversation(refused, [], Script("one"))
    with pytest.raises(typer.Exit):
        chat.run("model")
    assert chat.messages == []


class Handler(BaseHTTPRequestHandler):
    """Lists one model and streams the last message back, word by word; those in parentheses are thoughts."""

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self._reply(404, {"error": {"message": "Not Found"}})
            return
        self._reply(200, {"data": [{"id": "small"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions" or body["model"] == "other":
            known = self.path == "/v1/chat/completions"
            self._reply(404, {"error": {"message": "the model 'other' does not exist here" if known else "Not Found"}})
            return
        if self.headers["Authorization"] != "Bearer secret":
            self._reply(401, {"error": {"message": "the API key is wrong"}})
            return
        self.send_response(200)
        self.end_headers()
        for word in body["messages"][-1]["content"].split():
            kind = "reasoning_content" if word.startswith("(") else "content"
            self._event({"choices": [{"delta": {kind: word}}]})
        self._event({"error": {"message": "gave up"}} if body["model"] == "broken" else {"choices": []})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_client_lists_models_and_streams(url: str, suffix: str) -> None:
    client = ChatClient(url + suffix, "secret")
    assert client.models() == ["small"]
    parts = list(client.stream("small", [{"role": "user", "content": "(so) b c"}], {}))
    assert parts == [TextPart("reasoning", "(so)"), TextPart("content", "b"), TextPart("content", "c")]


def test_client_reports_what_the_server_says(url: str) -> None:
    with pytest.raises(ChatServerError, match="the API key is wrong"):
        list(ChatClient(url).stream("small", [{"role": "user", "content": "a"}], {}))
    with pytest.raises(ChatServerError, match="gave up"):
        list(ChatClient(url, "secret").stream("broken", [{"role": "user", "content": "a"}], {}))


@pytest.mark.parametrize("model", [[], ["--model", "small"]])
def test_a_url_that_is_not_the_servers_is_named(
    url: str, model: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello you\n"))
    assert main(["chat", "--url", f"{url}/v2", *model]) == 1
    asked = f"{url}/v2/v1/{'chat/completions' if model else 'models'}"
    line = f"error: {asked} was not found there; --url should end in /v1, or be the server's root\n"
    assert capsys.readouterr().err == line


def test_a_model_that_the_server_lacks_is_not_blamed_on_the_url(url: str) -> None:
    with pytest.raises(ChatServerError, match=r"^the model 'other' does not exist here$"):
        list(ChatClient(url, "secret").stream("other", [{"role": "user", "content": "a"}], {}))


def test_client_without_a_server() -> None:
    with pytest.raises(ChatServerError, match=r"http://127.0.0.1:1 cannot be reached: connection refused"):
        ChatClient("http://127.0.0.1:1").models()


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        (["--api-key", "secret"], {"PYPTO_SERVING_API_KEY": "x"}),
        ([], {"PYPTO_SERVING_API_KEY": "secret", "OPENAI_API_KEY": "x"}),
        ([], {"PYPTO_SERVING_API_KEY": "", "OPENAI_API_KEY": "secret"}),
    ],
)
def test_chat_with_a_running_server(
    url: str,
    options: list[str],
    environment: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello you\n"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["chat", "--url", url, *options]) == 0
    assert capsys.readouterr().out == "helloyou\n"
