"""`collect-env`: print the facts that a report of a problem needs."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def collect_env(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Print versions, machine and variables, for a report of a problem. Values of keys and secrets are left out."""
    from pypto_serving.cli.report import columns, echo
    from pypto_serving.setup.environment import read_environment

    found = read_environment()
    if json:
        typer.echo(jsonlib.dumps(found))
        return
    for title, facts in found.items():
        if facts:
            typer.secho(title, bold=True)
            echo(columns(list(facts.items())), indent=2)
