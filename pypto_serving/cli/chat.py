"""`chat` and `complete`: talk to a model, or continue lines, on a running server or in this process."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pypto_serving.api.chat.parsers.scanner import TextPart
from pypto_serving.api.generation.choice import TokenUsage
from pypto_serving.cli import terminal
from pypto_serving.cli.client import ChatClient
from pypto_serving.cli.generate import DEFAULT_MAX_TOKENS, local_model
from pypto_serving.cli.options import ENGINE_PANELS, FLAGS, read_value, sampling_params, takes_options, takes_sampling
from pypto_serving.errors import ConfigError, PyptoError
from pypto_serving.setup.host import read_user_dir
from pypto_serving.setup.option_table import RULES
from pypto_serving.setup.options import Options
from pypto_serving.types.server_url import KEY_VARIABLES, key_in, require_key

ServerKey = Annotated[
    str | None, typer.Option(help=f"API key of the server at --url. (default: {' or '.join(KEY_VARIABLES)})")
]
Message = dict[str, str]
Answering = Generator[TextPart, None, TokenUsage | None]
Answer = Callable[[Sequence[Message]], Answering]

HINT = '/help lists commands, """ begins and ends several lines; Ctrl-C stops an answer, Ctrl-D leaves'
HELP = """\
/set NAME VALUE   set a sampling option; without VALUE it is the model's again, without NAME all are shown
/system TEXT      set the system prompt, without TEXT none, and forget the conversation
/retry            answer the last message again
/undo             forget the last message and its answer
/clear            forget the conversation
/stats            show or hide statistics after each answer
/exit             leave"""
_COMMAND = re.compile(r"/\w*")
"""Matches a first word that is a command or looks like one, but not a path."""
MAX_HISTORY = 1000
FENCE = '"""'
"""A line that begins and ends a message of several lines."""


@takes_options(*ENGINE_PANELS)
@takes_sampling
def chat(
    options: Options,
    sampling: dict[str, Any],
    url: Annotated[str | None, typer.Option(help="Chat with this running server; load no model here.")] = None,
    api_key: ServerKey = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat with MODEL, by default the bundled one, or with a running server. Lines may come from a pipe."""
    opening = [{"role": "system", "content": system}] if system else []
    with _answers(options, sampling, url, api_key, chats=True) as (answer, model):
        Conversation(answer, opening, LineReader(history_file()), sampling).run(model)


@takes_options(*ENGINE_PANELS)
@takes_sampling
def complete(
    options: Options,
    sampling: dict[str, Any],
    url: Annotated[str | None, typer.Option(help="Ask this running server; load no model here.")] = None,
    api_key: ServerKey = None,
) -> None:
    """Continue each line with MODEL, by default the bundled one, or with a running server, as it comes."""
    sampling.setdefault("max_tokens", DEFAULT_MAX_TOKENS)
    with _answers(options, sampling, url, api_key, chats=False) as (answer, model):
        Conversation(answer, [], LineReader(), sampling).run(model)


@contextmanager
def _answers(
    options: Options, sampling: dict[str, Any], url: str | None, api_key: str | None, *, chats: bool
) -> Iterator[tuple[Answer, str]]:
    """Yield a function that answers messages, or continues the text of the last one, and the model's name.

    The function asks the server at `url`, or a model in this process. Raises ConfigError for options of the other.
    """
    if url is None:
        if api_key is not None:
            raise ConfigError("--api-key has no effect without --url; drop it")
        with local_model(options) as llm:
            stream = llm.stream_chat if chats else lambda messages, params: llm.stream(messages[-1]["content"], params)
            yield lambda messages: stream(messages, sampling_params(llm, sampling)), options.model or "bundled"
        return
    for name in RULES:
        if name != "model" and getattr(options, name) is not None:
            raise ConfigError(f"{options.label(name)} has no effect with --url; drop one of them")
    client = ChatClient(url, key_in(os.environ) if api_key is None else require_key("--api-key", api_key))
    model = options.model or client.models()[0]
    if chats:
        yield lambda messages: client.stream(model, messages, sampling), model
    else:
        yield lambda messages: client.stream_text(model, messages[-1]["content"], sampling), model


@dataclass
class Timing:
    """Times of an answer's request and first text, in seconds of `time.monotonic`."""

    started_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0

    def arrived(self) -> None:
        self.last_s = time.monotonic()
        self.first_s = self.first_s or self.last_s

    def describe(self, usage: TokenUsage | None) -> str:
        """Return one line of statistics."""
        facts = [f"first text after {(self.first_s or time.monotonic()) - self.started_s:.2f} s"]
        if usage is not None:
            facts.insert(0, f"{usage.num_output_tokens} tokens")
            if self.last_s > self.started_s:  # from the request on: texts of several tokens may arrive at once
                facts.insert(1, f"{usage.num_output_tokens / (self.last_s - self.started_s):.1f} tokens/s in all")
            facts.append(f"{usage.num_prompt_tokens} prompt tokens, {usage.num_cached_tokens} cached")
        return "[" + ", ".join(facts) + "]"


class Conversation:
    """Keeps the messages of a chat and answers lines. `answer` streams the reply to all messages.

    `sampling` holds the options that `/set` changes and `answer` reads. Reasoning is printed to stderr, but not kept.
    """

    def __init__(
        self,
        answer: Answer,
        opening: Sequence[Message],
        read_line: Callable[[], str],
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self._answer_to = answer
        self._opening = list(opening)
        self._read_line = read_line
        self._sampling = {} if sampling is None else sampling
        self._shows_stats = sys.stdin.isatty()
        self.messages = list(opening)

    def run(self, name: str) -> None:
        """Answer lines until the input ends or the user leaves."""
        if sys.stdin.isatty():
            terminal.write(f"{name}: {HINT}", to_stderr=True, newline=True)
        while True:
            try:
                line = self._read_line().rstrip("\r\n")
            except EOFError:
                return
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                typer.echo(f"\n{HINT}", err=True)
                continue
            command, _, rest = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                return
            if _COMMAND.fullmatch(command):
                self._command(command, rest.strip())
            elif command:
                self._answer(line)

    def _command(self, name: str, rest: str) -> None:
        match name:
            case "/clear":
                self.messages = list(self._opening)
            case "/system":
                self._opening = [{"role": "system", "content": rest}] if rest else []
                self.messages = list(self._opening)
            case "/undo":
                self._forget_last()
            case "/retry":
                if last := self._forget_last():
                    self._answer(last)
            case "/stats":
                self._shows_stats = not self._shows_stats
            case "/set":
                option, _, value = rest.partition(" ")
                self._set(option, value.strip())
            case "/help":
                typer.echo(HELP, err=True)
            case _:
                typer.echo(f"error: there is no command {name}; there are:\n{HELP}", err=True)

    def _forget_last(self) -> str:
        """Forget the last message of the user with its answer, and return it; "" if there is none."""
        while len(self.messages) > len(self._opening):
            message = self.messages.pop()
            if message["role"] == "user":
                return message["content"]
        return ""

    def _set(self, name: str, value: str) -> None:
        """Change one sampling option, and show all options that are set."""
        try:
            if name and name not in FLAGS:
                raise ConfigError(f"there is no option {name}; there are {', '.join(FLAGS)}")
            if value:
                self._sampling[name] = read_value(name, value)
            else:
                self._sampling.pop(name, None)
        except ConfigError as error:
            typer.echo(f"error: {error}", err=True)
            return
        given = ", ".join(f"{key} {self._sampling[key]}" for key in self._sampling)
        typer.echo(given or "all options are the model's own", err=True)

    def _answer(self, line: str) -> None:
        """Stream one answer. After an interrupt, keep the text so far; forget a refused message."""
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        timing, usage = Timing(), None
        stream = self._answer_to(self.messages)
        try:
            usage = _print(stream, pieces, timing)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False, err=True)
        except PyptoError as error:
            self.messages.pop()
            terminal.write(f"error: {error}", to_stderr=True, newline=True)
            if not sys.stdin.isatty():
                raise typer.Exit(error.exit_code) from None
            return
        finally:
            stream.close()
        typer.echo()
        if self._shows_stats:
            terminal.write(timing.describe(usage), to_stderr=True, dim=True, newline=True)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def _print(stream: Answering, pieces: list[str], timing: Timing) -> TokenUsage | None:
    """Print an answer, append its content to `pieces`, and return its usage."""
    thought = False
    while True:
        try:
            part = next(stream)
        except StopIteration as end:
            usage: TokenUsage | None = end.value
            return usage
        timing.arrived()
        if part.kind == "reasoning":
            terminal.write(part.text, to_stderr=True, dim=True)
            thought = True
            continue
        if thought and not pieces:
            typer.echo("\n", err=True)
        pieces.append(part.text)
        terminal.write(part.text)


class LineReader:
    """Reads messages from the terminal, or lines from a pipe. Keeps the history in `file` if possible."""

    def __init__(self, file: Path | None = None) -> None:
        self._read = _prompted(file) if sys.stdin.isatty() else _piped

    def __call__(self) -> str:
        """Read one message. Raises EOFError at the end of the input."""
        line = self._read("> ")
        if line.strip() == FENCE:
            lines: list[str] = []
            while (line := self._read("… ").rstrip("\n")).strip() != FENCE:
                lines.append(line)
            return "\n".join(lines)
        while line.rstrip("\n").endswith("\\"):
            line = line.rstrip("\n")[:-1] + "\n" + self._read("… ")
        return line


def history_file() -> Path | None:
    """Return the history file of `chat`, in the user's state folder; None if there is no such folder."""
    folder = read_user_dir("XDG_STATE_HOME", ".local/state")
    return Path(folder, "chat_history") if folder else None


def _piped(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _prompted(file: Path | None) -> Callable[[str], str]:
    """Return a function that reads a line with editing and history. Only the user can read the history file."""
    import atexit
    import readline

    if file is not None:
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.read_history_file(file)
            readline.set_history_length(MAX_HISTORY)
            atexit.register(_keep, file)
    return input


def _keep(file: Path) -> None:
    import readline

    with suppress(OSError):
        readline.write_history_file(file)
