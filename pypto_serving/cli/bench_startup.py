"""`bench startup`: start a server several times, and measure when it is ready and when it has answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Annotated

import typer

from pypto_serving.cli.bench_common import OutputJson, one_line_errors, write_output
from pypto_serving.errors import PyptoError
from pypto_serving.types.server_url import key_in

COLUMNS = {"ready_s": "ready", "answered_s": "first text", "stopped_s": "stopped"}


def startup(
    context: typer.Context,
    runs: Annotated[int, typer.Option(min=1, help="Starts.")] = 5,
    output_json: OutputJson = None,
) -> None:
    """Start `serve` with the options after --, and measure the seconds until it is ready and to its first text.

    For example: bench startup --runs 3 -- MODEL --packed-cache
    """
    with one_line_errors():
        found = [_measure(context.args) for _ in range(runs)]
    typer.echo(f"{'run':>10}" + "".join(f"{name + ' (s)':>16}" for name in COLUMNS.values()))
    middle = {key: median(times[key] for times in found) for key in COLUMNS}
    for name, times in [*enumerate(found, 1), ("median", middle)]:
        typer.echo(f"{name:>10}" + "".join(f"{times[key]:>16.3f}" for key in COLUMNS))
    write_output(output_json, found)


def _measure(arguments: list[str]) -> dict[str, float]:
    """Start a server, ask it once, and stop it; raise PyptoError if it does not start."""
    from pypto_serving.cli.client import ChatClient

    command = [sys.executable, "-m", "pypto_serving", "serve", *arguments, "--port", "0", "--log-level", "warning"]
    started_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        try:
            try:
                ready = json.loads(server.stdout.readline())
                url, model = ready["url"], ready["model"][0]
            except (ValueError, KeyError):
                server.terminate()
                said = server.stderr.read().strip() or "it said nothing"
                raise PyptoError(f"the server did not start: {said.splitlines()[-1]}") from None
            ready_s = time.perf_counter() - started_s
            stream = ChatClient(url, key_in(os.environ)).stream_text(model, "Hello", {})
            next(stream, None)
            answered_s = time.perf_counter() - started_s
            stream.close()
            stopping_s = time.perf_counter()
            server.terminate()
            server.wait()
        finally:
            server.kill()
    return {"ready_s": ready_s, "answered_s": answered_s, "stopped_s": time.perf_counter() - stopping_s}
