"""`models`: list the models in the caches and those with short names, and delete some."""

from __future__ import annotations

from typing import Annotated

import typer

from pypto_serving.util import format_size

models_app = typer.Typer(help="List the models in the caches, and those that have short names; delete some.")
_ROOM_BYTES = 1 << 30
"""Memory for KV blocks and workspace, beside the weights, in which a model is useful."""


@models_app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models in the caches with their size on disk, and short names that `serve` takes.

    For each name it says whether the model fits the memory that is free now.
    """
    if context.invoked_subcommand is not None:
        return
    import msgspec

    from pypto_serving.cli.report import columns, echo
    from pypto_serving.setup.catalog import known_models
    from pypto_serving.setup.host import read_host_facts
    from pypto_serving.setup.model_cache import cached_models

    cached, free = cached_models(), read_host_facts().available_bytes
    known = sorted(known_models(), key=lambda model: model.parameters)
    fits = {model.name: model.file_bytes + _ROOM_BYTES <= free for model in known}
    if json:
        names = [{**msgspec.to_builtins(model), "fits": fits[model.name], "source": model.source} for model in known]
        found = [{"name": model.name, "num_bytes": model.num_bytes, "paths": map(str, model.paths)} for model in cached]
        typer.echo(msgspec.json.encode({"cached": found, "known": names, "available_bytes": free}, enc_hook=list))
        return
    if cached:
        echo(columns([("in the cache", "on disk"), *((model.name, format_size(model.num_bytes)) for model in cached)]))
        echo([f"{format_size(sum(model.num_bytes for model in cached))} in total; `models rm NAME` deletes one", ""])
    rows = [
        (
            model.name,
            model.quantization,
            format_size(model.file_bytes),
            "yes" if fits[model.name] else "no",
            model.licence,
            model.source,
        )
        for model in known
    ]
    head = ("name for serve", "weights", "size", "fits", "licence", "source")
    echo(columns([head, *rows]))
    echo([f"{format_size(free)} of memory is free"])


@models_app.command()
def rm(name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `models` lists.")]) -> None:
    """Delete all files of a model and what they were unpacked to; a server that uses it should be stopped before."""
    from pypto_serving.setup.model_cache import remove

    model = remove(name)
    typer.echo(f"deleted {model.name}: {format_size(model.num_bytes)}")
