"""Run the command `run-batch`: answer the requests of a file, without a server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pypto_serving.cli.options import ENGINE_PANELS, takes_options
from pypto_serving.errors import ConfigError
from pypto_serving.setup.options import Options
from pypto_serving.util import counted

if TYPE_CHECKING:
    from pypto_serving.api.batch.running import AnswerFile, Limits
    from pypto_serving.api.settings import ServingConfig
    from pypto_serving.setup.resolver import Resolved


MAX_REQUESTS, MAX_SHOWN = 1_000_000, 5


@takes_options(*ENGINE_PANELS, also=["served_model_name", "otlp_traces_endpoint"])
def run_batch(
    options: Options,
    input_file: Annotated[Path, typer.Option("-i", "--input-file", metavar="FILE", help="Requests, one JSON a line.")],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", metavar="FILE", help="Answers; requests that have one are left out.")
    ],
) -> None:
    """Answer the requests of a file with MODEL, by default the bundled one; a run that was cut off goes on.

    Exits with 1 if any answer is an error.
    """
    import uvloop

    from pypto_serving.api.settings import serving_config
    from pypto_serving.cli.serve import configure_logging
    from pypto_serving.setup.option_table import QUIET_DEFAULTS
    from pypto_serving.setup.prepare import model_spec, prepare

    configure_logging(options, QUIET_DEFAULTS)
    model = model_spec(options)
    resolved = prepare(options, model, QUIET_DEFAULTS, serves=False)
    if uvloop.run(_run(resolved, serving_config(resolved.server, model), input_file, output_file)):
        raise typer.Exit(1)


async def _run(resolved: Resolved, serving: ServingConfig, source: Path, target: Path) -> int:
    """Answer all requests, say how many, and return the number of answers that are errors."""
    from pypto_serving.api.batch.running import Direct, Limits, Run, read
    from pypto_serving.api.server import create_app
    from pypto_serving.engine.replicas import make_engine

    engine = make_engine(resolved.engines)
    app = create_app(engine, serving)
    direct = Direct(app)
    limits = Limits(MAX_REQUESTS, serving.max_body_bytes, direct.paths)
    count = _check(source, limits)
    output = _open(target)
    left_out = len(output.answered)
    tasks: list[asyncio.Task[Any]] = []
    try:
        await engine.start()
        dead = asyncio.create_task(engine.wait_dead())
        run = Run(direct, output, resolved.engines[0].limits.max_num_seqs, lambda: _show(len(output.answered), count))
        await engine.wait_ready()
        answering = asyncio.create_task(run.answer(read(source, limits)))
        tasks = [answering, dead]
        await asyncio.wait({answering, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            raise dead.result()
        await answering
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        output.close()
        await app.state.reading.close()
        await engine.stop()
        if app.state.service.tracing is not None:
            await app.state.service.tracing.aclose()
    answered = counted(len(output.answered) - left_out, "request")
    typer.echo(f"answered {answered}, {output.num_failed} of {len(output.answered)} with an error", err=True)
    return output.num_failed


def _check(path: Path, limits: Limits) -> int:
    """Return the number of requests in a file. Raises ConfigError that names the first invalid lines."""
    from pypto_serving.api.batch.running import check

    _require_file("--input-file", path)
    try:
        found = check(path, limits)
    except OSError as error:
        raise ConfigError(f"--input-file {path} cannot be read: {error.strerror}; give another") from error
    if found.problems:
        shown = "; ".join(f"line {problem.line}: {problem.message}" for problem in found.problems[:MAX_SHOWN])
        raise ConfigError(f"--input-file {path} cannot be answered: {shown}")
    return found.num_requests


def _require_file(option: str, path: Path) -> None:
    """Raise ConfigError for a pipe or a device, which cannot be read twice or may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ConfigError(f"{option} {path} is a pipe or a device, but must be a file; give another")


def _open(path: Path) -> AnswerFile:
    from pypto_serving.api.batch.running import AnswerFile

    _require_file("--output-file", path)
    try:
        return AnswerFile(path)
    except BlockingIOError as error:
        raise ConfigError(f"--output-file {path} is written by another run; wait for its end") from error
    except OSError as error:
        raise ConfigError(f"--output-file {path} cannot be written: {error.strerror}; give another") from error
    except ValueError as error:
        raise ConfigError(f"--output-file {path} has lines that are not answers; give another") from error


def _show(answered: int, count: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\r{answered}/{count}", nl=answered == count, err=True)
