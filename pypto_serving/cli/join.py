"""Run the command `join`: compute the ranks of a replica that another host serves."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from pypto_serving.cli.help import HelpCommand
from pypto_serving.cli.options import CHECKPOINT
from pypto_serving.errors import EXIT_OK, ConfigError
from pypto_serving.types.start import SECRET_VARIABLE

app = typer.Typer(add_completion=False)


@app.command(cls=HelpCommand)
def join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The --join-address of the serving host.")],
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=f"{CHECKPOINT} Its own copy.")] = None,
    join_secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Secret of both hosts. (default: {SECRET_VARIABLE})")
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Threads that compute. (default: one per CPU)")
    ] = None,
    log_format: Annotated[str, typer.Option(metavar="FORM", help="text, or json: one object on each line.")] = "text",
) -> None:
    """Join the host that serves MODEL with --join-address, and compute its other ranks.

    It may start first, and joins again whenever that host has started anew. The configuration is that of the serving
    host. When the ranks are loaded, stdout gets one line of JSON.
    """
    from pypto_serving.engine.joining import join_again
    from pypto_serving.logs import configure as configure_logs
    from pypto_serving.setup.host import read_cache_dir, read_host_facts
    from pypto_serving.setup.locate import locate_model
    from pypto_serving.setup.option_table import RULES
    from pypto_serving.setup.rules import HostPortRule
    from pypto_serving.types.start import HostJoin

    try:
        HostPortRule().parse(address)
    except ValueError:
        raise ConfigError(f"HOST:PORT is {address}, but must be {HostPortRule.allowed}") from None
    try:
        form = RULES["log_format"].parse(log_format)
    except ValueError:
        raise ConfigError(f"--log-format is {log_format}, but must be {RULES['log_format'].allowed}") from None
    configure_logs("join", "info", form)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    host = read_host_facts()
    start = HostJoin(
        address=address,
        secret_file=str(join_secret_file or ""),
        model=str(locate_model(model)),
        cache_dir=read_cache_dir(),
        nodes=host.nodes,
        num_threads=num_threads or host.num_cpus,
        log_format=form,
    )
    join_again(start, lambda: typer.echo(json.dumps({"event": "joined", "address": address, "pid": os.getpid()})))


def _exit(number: int, frame: object) -> None:
    raise SystemExit(EXIT_OK)
