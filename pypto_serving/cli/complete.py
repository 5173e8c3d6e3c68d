"""Run the command `complete`: continue texts as they are typed, on a running server or in this process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pypto_serving.cli.chat import ServerKey, model_here, remote_model
from pypto_serving.cli.conversation import Answer, Conversation, LineReader
from pypto_serving.cli.generate import DEFAULT_MAX_TOKENS
from pypto_serving.cli.help import HelpCommand
from pypto_serving.cli.options import ENGINE_PANELS, takes_options
from pypto_serving.cli.sampling import sampling_params, takes_sampling
from pypto_serving.setup.options import Options

app = typer.Typer(add_completion=False)


@app.command(cls=HelpCommand)
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

    def talk(answer: Answer, name: str) -> None:
        Conversation(answer, [], LineReader(), sampling).run(name)

    if url is not None:
        client, model = remote_model(options, url, api_key)
        talk(lambda messages: client.stream_text(model, messages[-1]["content"], sampling), model)
        return
    with model_here(options, api_key) as (llm, model):
        talk(lambda messages: llm.stream(messages[-1]["content"], sampling_params(llm, sampling)), model)
