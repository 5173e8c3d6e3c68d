"""What a user commands in a conversation, and how lines are read."""

from __future__ import annotations

import io
import os
import pty
import select
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pypto_serving.api.chat.parsers.scanner import TextPart
from pypto_serving.api.generation.choice import TokenUsage
from pypto_serving.cli.chat import Conversation, LineReader, Message, Timing

WAIT_S = 60.0


class Lines:
    """Lines that a user types."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    def __call__(self) -> str:
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


def count(messages: Sequence[Message]) -> Generator[TextPart, None, TokenUsage]:
    """Answers the last message with how many there are."""
    yield TextPart("content", f"{messages[-1]['content']} {len(messages)}")
    return TokenUsage(9, 4, 3, ())


def talk(*lines: str, sampling: dict[str, Any] | None = None) -> Conversation:
    chat = Conversation(count, [], Lines(*lines), sampling)
    chat.run("model")
    return chat


def test_the_last_message_is_forgotten_and_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk("/undo", "/retry", "one", "two", "/retry", "/undo", "three")
    assert capsys.readouterr().out == "one 1\ntwo 3\ntwo 3\nthree 3\n"
    assert [message["content"] for message in chat.messages] == ["one", "one 1", "three", "three 3"]


def test_messages_come_as_they_were_typed(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk("  one \n", " \n", "/usr/bin is", "\ttwo\r\n", " /undo ")
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["  one ", "/usr/bin is"]
    assert capsys.readouterr().err == ""


def test_a_system_prompt_begins_another_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    chat = talk("one", "/system Be brief.", "two", "/clear", "/undo")
    assert capsys.readouterr().out == "one 1\ntwo 2\n"
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert talk("/system x", "/system").messages == []


def test_options_are_set_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sampling: dict[str, Any] = {"top_p": 0.5}
    talk("/set temperature 0.7", "/set top_k 5", "/set stop the end", "/set top_p", "/set", sampling=sampling)
    assert sampling == {"temperature": 0.7, "top_k": 5, "stop": ["the end"]}
    assert capsys.readouterr().err.splitlines()[-1] == "temperature 0.7, top_k 5, stop ['the end']"
    talk("/set temperature hot", "/set temperature -1", "/set top_k 1.5", "/set heat 3", sampling=sampling)
    hot, cold, half, heat = capsys.readouterr().err.splitlines()
    assert hot == "error: temperature is 'hot', but must be a number"
    assert cold.startswith("error: temperature is -1.0") and half.startswith("error: top_k is '1.5'")
    assert heat.startswith("error: there is no option heat; there are temperature, ")
    assert sampling["temperature"] == 0.7


def test_a_command_that_is_none_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    talk("/help")
    commands = capsys.readouterr().err
    talk("/histroy")
    assert capsys.readouterr().err == "error: there is no command /histroy; there are:\n" + commands


def test_statistics_are_shown_when_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    talk("one", "/stats", "two")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[4 tokens, ") and line.endswith(" s, 9 prompt tokens, 3 cached]")


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("one\ntwo\n", ["one\n", "two\n"]),
        ('"""\none\n\n  two\n"""\nthree\n', ["one\n\n  two", "three\n"]),
        ("one\\\ntwo\\\nthree\n", ["one\ntwo\nthree\n"]),
        ('"""\ncut', []),
    ],
)
def test_several_lines_are_one_message(typed: str, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    read, found = LineReader(), []
    with pytest.raises(EOFError):
        while True:
            found.append(read())
    assert found == messages


def on_terminal(lines: Sequence[str], environment: dict[str, str]) -> str:
    """Type `lines` into `chat` on a terminal, each behind a prompt; return what was shown."""
    process, terminal = pty.fork()
    if process == 0:
        command = [sys.executable, "-m", "pypto_serving", "chat", "--max-model-len", "256"]
        os.execve(sys.executable, command, {**os.environ, **environment, "TERM": "dumb"})
    shown, typed, until_s = b"", 0, time.monotonic() + WAIT_S
    try:
        while time.monotonic() < until_s:
            if shown.count(b"> ") > typed and typed < len(lines):
                os.write(terminal, lines[typed].encode())
                typed += 1
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 4096)
    except OSError:  # the process has closed the terminal
        pass
    finally:
        os.close(terminal)
    assert os.waitpid(process, 0)[1] == 0
    return shown.decode()


@pytest.mark.e2e
def test_a_terminal_has_statistics_and_a_history(tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path)}
    shown = on_terminal(["What is 1 + 2?\n", "/set max_tokens 3\n", "/exit\n"], state)
    assert "1 + 2 = 3" in shown and "tokens/s" in shown and "max_tokens 3" in shown
    history = tmp_path / "pypto-serving/chat_history"
    assert history.read_text().splitlines()[-3:] == ["What is 1 + 2?", "/set max_tokens 3", "/exit"]
    assert history.stat().st_mode & 0o777 == 0o600
    assert "1 + 2 = 3" in on_terminal(["\x1b[A\x1b[A\x1b[A\n", "/exit\n"], state)


def test_an_answer_that_comes_in_one_piece_has_no_absurd_speed() -> None:
    timing = Timing(started_s=time.monotonic() - 2)
    timing.arrived()
    timing.arrived()
    shown = timing.describe(TokenUsage(9, 50, 0, ()))
    assert "50 tokens, 25.0 tokens/s in all, first text after 2.00 s" in shown
    assert "tokens/s" not in Timing().describe(TokenUsage(9, 0, 0, ()))
