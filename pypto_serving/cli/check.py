"""`check`: print the configuration that `serve` would use, without loading weights."""

from __future__ import annotations

from typing import Annotated

import typer

from pypto_serving.cli.options import ALL_PANELS, takes_options
from pypto_serving.errors import ModelError, PyptoError
from pypto_serving.setup.options import Options


@takes_options(*ALL_PANELS)
def check(
    options: Options,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the contents of the model's files, the resolved configuration with reasons, and the memory plan.

    Nothing is loaded but the tokenizer. For a model that is too large for this machine, print its files and KV groups.
    Files that do not fit config.json are an error.
    """
    from pypto_serving.api.settings import serving_config
    from pypto_serving.api.text.files import has_tokenizer
    from pypto_serving.api.text.tokenizer import Tokenizer
    from pypto_serving.cli import report
    from pypto_serving.cli.serve import with_chat
    from pypto_serving.setup.memory_planner import TooLittleMemoryError
    from pypto_serving.setup.prepare import model_contents, prepare

    model, contents = model_contents(options)
    try:
        resolved = prepare(options, model)
        serving = serving_config(resolved.server, model)
        resolved, sampling = with_chat(resolved, serving), serving.default_sampling
        tokenizer = "none"
        if has_tokenizer(serving.tokenizer_dir):
            loaded = Tokenizer.load(serving.tokenizer_dir)
            tokenizer = f"{loaded.kind}, {loaded.size} tokens"
    except PyptoError as error:
        if json:
            typer.echo(report.as_json(model, contents, obstacle=str(error)))
        elif contents is not None and isinstance(error, TooLittleMemoryError):
            report.show_files(model, contents)
        raise
    obstacle = contents.obstacle if contents is not None else ""
    if json:
        typer.echo(report.as_json(model, contents, resolved, sampling.given(), obstacle, tokenizer))
    else:
        if contents is not None:
            report.show_files(model, contents)
        report.show(resolved, model, contents, tokenizer)
        typer.echo(sampling.describe())
    if obstacle:
        raise ModelError(obstacle)
