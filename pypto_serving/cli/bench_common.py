"""Shared by the commands of `bench`: options of a server, progress, and the outcome of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from pypto_serving.cli import terminal
from pypto_serving.errors import ConfigError
from pypto_serving.types.config import ServerConfig, default_of

if TYPE_CHECKING:
    from pypto_serving.bench.report import Saving
    from pypto_serving.bench.runner import Outcome

T = TypeVar("T")


def option(panel: str, **same: Any) -> Callable[..., Any]:
    """Return a function that makes options; help lists them under `panel`."""
    return functools.partial(typer.Option, rich_help_panel=panel, **same)


SERVER = "Server"
server, result = option(SERVER), option("Result")
HOST, PORT = default_of(ServerConfig, "host"), default_of(ServerConfig, "port")
BaseUrl = Annotated[str | None, server(help="Server, instead of --host and --port.")]
Host = Annotated[str, server(help="Server host.")]
Port = Annotated[int, server(min=1, max=65535, help="Server port.")]
ModelName = Annotated[str | None, server(help="Model name; default: the server's first.")]
Timeout = Annotated[float, server(help="Seconds that one request may take.")]
SaveResult = Annotated[bool, result("--save-result", help="Write the result as JSON.")]
SaveDetailed = Annotated[bool, result("--save-detailed", help="Add the times of each request.")]
ResultDir = Annotated[Path, result(help="Folder of the result file.")]
ResultFilename = Annotated[str | None, result(help="Name of the result file.")]
OutputJson = Annotated[Path | None, typer.Option(help="Also write the result as JSON into this file.")]


def is_given(context: typer.Context, name: str) -> bool:
    """Return True if the user gave the option."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def given_names(context: typer.Context) -> list[str]:
    """Return the names of the options that the user gave."""
    return [name for name in context.params if is_given(context, name)]


def build(kind: type[T], params: Mapping[str, Any], prefix: str = "", /, **others: Any) -> T:
    """Make a dataclass from `others` and from the options named `prefix` plus the name of a field."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: params[prefix + name] for name in names if prefix + name in params} | others)


def flag(name: str) -> str:
    """Return the flag of an option: `--max-num-seqs` for `max_num_seqs`."""
    return "--" + name.replace("_", "-")


def server_url(base_url: str | None, host: str, port: int) -> str:
    """Return the URL of the server, without a slash at the end."""
    own = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return own if base_url is None else base_url.rstrip("/")


def check_url(given: Sequence[str]) -> None:
    """Raise ConfigError for --host or --port beside --base-url."""
    if "base_url" in given and (clash := {"host", "port"}.intersection(given)):
        raise ConfigError(f"--base-url already names the server; drop {flag(min(clash))}")


def check_shared(given: Sequence[str]) -> None:
    """Raise ConfigError for options of server or result file that have no effect in this combination."""
    check_url(given)
    if "save_result" not in given:
        for name in ("save_detailed", "result_dir", "result_filename", "metadata"):
            if name in given:
                raise ConfigError(f"{flag(name)} has no effect without --save-result; add it")


def write_output(path: Path | None, result: object) -> None:
    """Write a result as JSON, if a file is given. Raises ConfigError."""
    if path is None:
        return
    try:
        path.write_bytes(msgspec.json.encode(result) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output-json {path} cannot be written: {error.strerror}; give another") from None


def run_requests(work: Callable[[Callable[[], None]], Coroutine[Any, Any, T]], total: int) -> T:
    """Run the coroutine `work(advance)` under a progress bar; it calls `advance` once per finished request."""
    import uvloop

    from pypto_serving.setup.host import raise_file_limit

    raise_file_limit()  # each request in flight has a socket
    with request_progress(total) as advance:
        return uvloop.run(work(advance))


@contextlib.contextmanager
def request_progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar if stderr is a terminal; yield a function to call once per finished request."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, refresh_per_second=2, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)


def report_outcome(outcome: Outcome, saving: Saving | None) -> None:
    """Print table, failures and warnings, and save the result; exit with 1 if no request succeeded."""
    from pypto_serving.bench import metrics, report

    typer.echo(report.render(outcome.result))
    for line in [*report.failure_lines(outcome.records), *(f"warning: {w}" for w in outcome.warnings)]:
        terminal.write(line, to_stderr=True, newline=True)
    if saving is not None:
        extra = metrics.details(outcome.records) if saving.detailed else {}
        typer.echo(f"saved {saving.write(outcome.result | extra)}", err=True)
    if not outcome.result["completed"]:
        raise typer.Exit(1)
