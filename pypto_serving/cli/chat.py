"""Run the command `chat`: talk to a model, on a running server or in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pypto_serving.cli.client import ChatClient
from pypto_serving.cli.conversation import Answer, Conversation, LineReader, history_file
from pypto_serving.cli.generate import local_model
from pypto_serving.cli.help import HelpCommand
from pypto_serving.cli.options import ENGINE_PANELS, takes_options
from pypto_serving.cli.sampling import sampling_params, takes_sampling
from pypto_serving.errors import ConfigError
from pypto_serving.setup.option_table import RULES
from pypto_serving.setup.options import Options
from pypto_serving.types.server_url import KEY_VARIABLES, key_in, require_key

if TYPE_CHECKING:
    from pypto_serving.offline.llm import LLM

app = typer.Typer(add_completion=False)

ServerKey = Annotated[
    str | None, typer.Option(help=f"API key of the server at --url. (default: {' or '.join(KEY_VARIABLES)})")
]


@app.command(cls=HelpCommand)
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

    def talk(answer: Answer, name: str) -> None:
        Conversation(answer, opening, LineReader(history_file()), sampling).run(name)

    if url is not None:
        client, model = remote_model(options, url, api_key)
        talk(lambda messages: client.stream(model, messages, sampling), model)
        return
    with model_here(options, api_key) as (llm, model):
        talk(lambda messages: llm.stream_chat(messages, sampling_params(llm, sampling)), model)


def remote_model(options: Options, url: str, api_key: str | None) -> tuple[ChatClient, str]:
    """Return the client of a running server, and the model to ask for; raise ConfigError for options of an engine."""
    for name in RULES:
        if name != "model" and getattr(options, name) is not None:
            raise ConfigError(f"{options.label(name)} has no effect with --url; drop one of them")
    client = ChatClient(url, key_in(os.environ) if api_key is None else require_key("--api-key", api_key))
    return client, options.model or client.models()[0]


@contextmanager
def model_here(options: Options, api_key: str | None) -> Iterator[tuple[LLM, str]]:
    """Open a model in this process; yield it and its name. Raise ConfigError for the key of a server."""
    if api_key is not None:
        raise ConfigError("--api-key has no effect without --url; drop it")
    with local_model(options) as llm:
        yield llm, options.model or "bundled"
