"""Run the command `chat`: talk to a model, on a running server or in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Annotated, Any

import typer

from pypto_serving.api.chat.output import TextPart
from pypto_serving.cli.client import ChatClient
from pypto_serving.cli.help import HelpCommand
from pypto_serving.cli.local import local_model
from pypto_serving.cli.options import ENGINE_PANELS, takes_options
from pypto_serving.cli.sampling import sampling_params, takes_sampling
from pypto_serving.errors import ConfigError, PyptoError
from pypto_serving.setup.options import Options
from pypto_serving.setup.rules import RULES
from pypto_serving.types.server_url import KEY_VARIABLES, key_in, require_key

app = typer.Typer(add_completion=False)

Message = dict[str, str]
Answer = Callable[[Sequence[Message]], Generator[TextPart]]

HELP = "/clear forgets the conversation, /exit leaves; Ctrl-C stops an answer, Ctrl-D leaves"


@app.command(cls=HelpCommand)
@takes_options(*ENGINE_PANELS)
@takes_sampling
def chat(
    options: Options,
    sampling: dict[str, Any],
    url: Annotated[str | None, typer.Option(help="Chat with this running server; load no model here.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help=f"API key of the server at --url. (default: {' or '.join(KEY_VARIABLES)})")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
) -> None:
    """Chat with MODEL, by default the bundled one, or with a running server. Lines may come from a pipe."""
    opening = [{"role": "system", "content": system}] if system else []
    if url is not None:
        _refuse_engine_options(options)
        key = key_in(os.environ) if api_key is None else require_key("--api-key", api_key)
        client = ChatClient(url, key)
        model = options.model or client.models()[0]
        Conversation(lambda messages: client.stream(model, messages, sampling), opening).run(model)
    elif api_key is not None:
        raise ConfigError("--api-key has no effect without --url; drop it")
    else:
        with local_model(options) as llm:
            params = sampling_params(llm, sampling)
            Conversation(lambda messages: _pieces(llm.stream_chat(messages, params)), opening).run(
                options.model or "bundled"
            )


def _pieces(stream: Iterator[TextPart]) -> Generator[TextPart]:
    yield from stream


def _refuse_engine_options(options: Options) -> None:
    for name in RULES:
        if name != "model" and getattr(options, name) is not None:
            raise ConfigError(f"{options.label(name)} has no effect with --url; drop one of them")


def _read_line() -> str:
    """Read one line. Raises EOFError at the end of the input."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line
    import readline  # noqa: F401  # gives input() line editing and a history

    return input("> ")


class Conversation:
    """Hold the messages of a chat and answer lines. `answer` streams the reply to all messages.

    Reasoning is printed to stderr and not kept.
    """

    def __init__(self, answer: Answer, opening: Sequence[Message], read_line: Callable[[], str] = _read_line) -> None:
        self._answer_to = answer
        self._opening = opening
        self._read_line = read_line
        self.messages = list(opening)

    def run(self, name: str) -> None:
        """Answer lines until the input ends or the user leaves."""
        if sys.stdin.isatty():
            typer.echo(f"{name}: {HELP}", err=True)
        while True:
            try:
                line = self._read_line().strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                typer.echo(f"\n{HELP}", err=True)
                continue
            if line in ("/exit", "/quit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> None:
        if line == "/clear":
            self.messages = list(self._opening)
        else:
            typer.echo(HELP, err=True)

    def _answer(self, line: str) -> None:
        """Stream one answer. Keep what came before an interrupt; forget a refused message."""
        self.messages.append({"role": "user", "content": line})
        pieces: list[str] = []
        thought = False
        stream = self._answer_to(self.messages)
        try:
            for part in stream:
                if part.kind == "reasoning":
                    typer.secho(part.text, nl=False, err=True, dim=True)
                    thought = True
                    continue
                if thought and not pieces:
                    typer.echo("\n", err=True)
                pieces.append(part.text)
                typer.echo(part.text, nl=False)
        except KeyboardInterrupt:
            typer.echo(" [stopped]", nl=False, err=True)
        except PyptoError as error:
            self.messages.pop()
            typer.echo(f"error: {error}", err=True)
            if not sys.stdin.isatty():
                raise typer.Exit(error.exit_code) from None
            return
        finally:
            stream.close()
        typer.echo()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
