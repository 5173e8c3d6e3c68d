"""`check`: what `serve` would run with, and why, before anything is loaded."""

from __future__ import annotations

from typing import Annotated

import typer

from pypto_serving.cli.options import ALL_PANELS, takes_options
from pypto_serving.options import Options

app = typer.Typer(add_completion=False)


@app.command()
@takes_options(*ALL_PANELS)
def check(
    options: Options,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the resolved configuration, the reason of each value and the memory plan; load nothing.

    Of a model that cannot be served, what its files hold and what its KV groups take is printed.
    """
    from pypto_serving.cli import report
    from pypto_serving.cli.serve import serving_config, with_chat
    from pypto_serving.model.locate import model_spec, prepare

    model = model_spec(options)
    if model.stored and not json:
        report.show_files(model)
    if model.obstacle:
        typer.echo(report.files_as_json(model) if json else f"Cannot be served: {model.obstacle}")
        return
    resolved = prepare(options, model)
    serving = serving_config(resolved, model)
    resolved, sampling = with_chat(resolved, serving), serving.default_sampling
    if json:
        typer.echo(report.as_json(resolved, model, sampling.given()))
    else:
        report.show(resolved, model, err=False)
        typer.echo(sampling.describe())
