"""`serve`: start the engine, then the HTTP server while the worker loads, and announce when both are ready.

Messages for people go to stderr. When the server is ready, stdout gets one line of JSON, or on a terminal a sentence.
`join` computes the ranks of a replica that another host serves.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from pypto_serving.cli import STARTED_S
from pypto_serving.cli.options import ALL_PANELS, CHECKPOINT, takes_options
from pypto_serving.errors import EXIT_OK, ConfigError, PyptoError
from pypto_serving.logs import configure as configure_logs
from pypto_serving.logs import with_fields, writes_json
from pypto_serving.processes import name_process
from pypto_serving.setup.options import Options, Setting
from pypto_serving.setup.resolver import Resolved
from pypto_serving.threads import start_task
from pypto_serving.types.config import ServerConfig
from pypto_serving.types.start import SECRET_VARIABLE

if TYPE_CHECKING:
    from pypto_serving.api.settings import ServingConfig
    from pypto_serving.cli.progress import LoadProgress
    from pypto_serving.engine.async_engine import AsyncEngine
    from pypto_serving.engine.replicas import Replicas

logger = logging.getLogger("pypto_serving.api")
LAST_REPLIES_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_hangups: list[int] = []
"""SIGHUPs that came before the HTTP server, which then reads its files again."""


@takes_options(*ALL_PANELS)
def serve(options: Options) -> None:
    """Serve MODEL over an OpenAI-compatible API; without MODEL, the bundled one."""
    before = {number: signal.signal(number, _exit) for number in STOP_SIGNALS}
    if options.api_key_file or options.ssl_certfile:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda number, _: _hangups.append(number))
    try:
        _run(options)
    except BaseException:
        for number, handler in before.items():
            signal.signal(number, handler)
        raise


def _exit(number: int, frame: object) -> None:
    """End the process on a stop signal before the event loop runs; nothing has started yet."""
    raise SystemExit(EXIT_OK)


def _run(options: Options) -> None:
    import uvloop

    from pypto_serving import __version__
    from pypto_serving.api.settings import serving_config
    from pypto_serving.cli import report
    from pypto_serving.setup.option_table import DEFAULTS
    from pypto_serving.setup.prepare import model_spec, prepare

    name_process("pypto-serve")
    configure_logging(options, DEFAULTS)
    options = with_given_socket(options)
    model = model_spec(options)
    resolved = prepare(options, model)
    check_address(options, resolved.server)
    serving = serving_config(resolved.server, model)
    resolved = with_chat(resolved, serving)
    if writes_json():
        settings = {each.name: each.value for each in resolved.settings}
        logger.info("pypto-serving %s", __version__, extra=with_fields(settings=settings))
        logger.info("memory plan", extra=with_fields(memory=report.planned(resolved, model)))
    else:
        with suppress(OSError):  # stderr is on a full disk, which must not stop a running server
            typer.secho(f"pypto-serving {__version__}", bold=True, err=True)
            report.summarize(resolved, model)
    with suppress(asyncio.CancelledError):  # stopped before the HTTP server existed
        uvloop.run(_serve(options, resolved, serving))
    logger.info("stopped after %.0f s", time.monotonic() - STARTED_S)


def with_given_socket(options: Options) -> Options:
    """Add the address of the service manager's socket, if there is one. Raises ConfigError."""
    from pypto_serving.api.http.listening import address_of, handed_over

    given = handed_over()
    if given is None:
        return options
    with given:
        address = address_of(given)
    for name in ("host", "port", "uds"):
        if getattr(options, name) is not None:
            raise ConfigError(f"{options.label(name)} and a socket of the service manager are both given; drop one")
    return msgspec.structs.replace(options, **address, from_environment=options.from_environment | address.keys())


def check_address(options: Options, server: ServerConfig) -> None:
    """Raise ConfigError if the server cannot listen on its address, before loading anything."""
    from pypto_serving.api.http.listening import close, listen_at, tls_context

    try:
        tls_context(server)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"{options.label('ssl_certfile')} {server.ssl_certfile}{' and its key' * bool(server.ssl_keyfile)} "
            f"cannot be used: {reason}; give PEM files without a password"
        ) from None
    try:
        close(listen_at(server), server)
    except (socket.gaierror, UnicodeError):
        raise _no_address(options, server) from None
    except OSError as error:
        raise _unusable(options, server, error) from None


def _unusable(options: Options, server: ServerConfig, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return _no_address(options, server)
    reason = os.strerror(error.errno or 0).lower()
    if server.uds:
        return ConfigError(f"{options.label('uds')} {server.uds} cannot be used: {reason}; give another path")
    return ConfigError(
        f"{options.label('port')} {server.port} on {server.host} cannot be used: {reason}; "
        "give another, or 0 for a free one"
    )


def _no_address(options: Options, server: ServerConfig) -> ConfigError:
    return ConfigError(f"{options.label('host')} {server.host} is not an address of this machine; give one, or 0.0.0.0")


async def _serve(options: Options, resolved: Resolved, serving: ServingConfig) -> None:
    from pypto_serving.api.run import ignore_signals
    from pypto_serving.cli.progress import LoadProgress
    from pypto_serving.engine.replicas import make_engine

    task = asyncio.current_task()
    assert task is not None
    for number in STOP_SIGNALS:  # until the HTTP server takes them over
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    progress = LoadProgress()
    engine = make_engine(resolved.engines, progress)
    await engine.start()  # the worker loads while this process imports the HTTP server
    try:
        await _serve_http(options, resolved, serving, engine, progress)
    finally:
        progress.close()
        await engine.stop()
        ignore_signals(STOP_SIGNALS)


async def _serve_http(
    options: Options,
    resolved: Resolved,
    serving: ServingConfig,
    engine: AsyncEngine | Replicas,
    progress: LoadProgress,
) -> None:
    """Serve HTTP until stopped, even while the worker loads. Raises the error that ended the engine or a task."""
    from pypto_serving.api.http.listening import pet_watchdog
    from pypto_serving.api.run import serve as listen
    from pypto_serving.api.server import create_app

    server = resolved.server
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    bound.add_done_callback(_hang_up_now)
    app = create_app(engine, serving, resolved.memory)
    http = asyncio.create_task(listen(app, server, bound.set_result))
    dead = asyncio.create_task(engine.wait_dead())

    lost: list[BaseException] = []

    def end(error: BaseException) -> None:
        if not isinstance(error, PyptoError):  # which `dead` has as well
            lost.append(error)
            signal.raise_signal(signal.SIGTERM)

    ready = start_task("the ready line", _announce(server, bound, engine, progress), end)
    watchdog = start_task("the watchdog", pet_watchdog(engine.health), end)
    try:
        await asyncio.wait({http, dead}, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            await _finish_replies(http, bound)
            raise dead.result()
        await http
    except OSError as error:
        raise _unusable(options, server, error) from error
    finally:
        for task in (http, dead, ready, watchdog):
            task.cancel()
        await asyncio.gather(http, dead, ready, watchdog, return_exceptions=True)
    if lost:
        raise lost[0]


def _hang_up_now(bound: asyncio.Future[int]) -> None:
    if _hangups:
        signal.raise_signal(_hangups.pop())


async def _finish_replies(http: asyncio.Task[None], bound: asyncio.Future[int]) -> None:
    """After the engine gave up, let the HTTP server answer open requests for a few seconds."""
    if bound.done() and not http.done():
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait({http}, timeout=LAST_REPLIES_S)


async def _announce(
    server: ServerConfig,
    bound: asyncio.Future[int],
    engine: AsyncEngine | Replicas,
    progress: LoadProgress,
) -> None:
    """Print the line on stdout once the port is open and the worker is ready."""
    from pypto_serving.api.http.listening import tell

    port = await bound
    await engine.wait_ready()
    progress.close()
    line: dict[str, Any] = {
        "event": "ready",
        **where(server, port),
        "pid": os.getpid(),
        "model": list(server.served_model_names),
        "ready_s": round(time.monotonic() - STARTED_S, 3),
    }
    if endpoints := engine.kv_events:
        events, replays = (list(each) for each in zip(*endpoints, strict=True))
        line["kv_events"], line["kv_events_replay"] = (events, replays) if len(events) > 1 else endpoints[0]
    try:
        if sys.stdout is not None and sys.stdout.isatty():
            at = line.get("url") or f"the socket {server.uds}"
            typer.echo(f"ready after {line['ready_s']:.1f} s: {', '.join(line['model'])} at {at}; Ctrl-C stops")
        else:
            typer.echo(json.dumps(line))
    except OSError as error:
        logger.warning("the ready line cannot be written to stdout: %s", os.strerror(error.errno or 0).lower())
    tell("READY=1")


def where(server: ServerConfig, port: int) -> dict[str, Any]:
    """Return the address for clients on this machine of a server that listens on `port`, or on a Unix socket."""
    if server.uds:
        return {"uds": server.uds}
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    scheme = "https" if server.ssl_certfile else "http"
    return {"url": f"{scheme}://{f'[{reachable}]' if ':' in reachable else reachable}:{port}", "port": port}


def with_chat(resolved: Resolved, serving: ServingConfig) -> Resolved:
    """Add the chat encoder to the settings. Raises ModelError or ConfigError if a given template is unusable."""
    from pypto_serving.api.prompting.prompts import describe_chat

    given = {
        "chat-template": serving.chat_template is not None,
        "tool-call-parser": serving.tool_call_parser != "auto",
        "reasoning-parser": serving.reasoning_parser != "auto",
    }
    described = zip(given, describe_chat(serving), strict=True)
    found = {
        name: Setting(name, value, reason) for name, (value, reason) in described if value == "off" or not given[name]
    }
    settings = tuple(found.get(setting.name, setting) for setting in resolved.settings)
    return msgspec.structs.replace(resolved, settings=settings)


def configure_logging(options: Options, defaults: Mapping[str, Any]) -> None:
    """Configure the log on stderr from `options`, else from `defaults`."""
    level: str = options.log_level or defaults["log_level"]
    configure_logs("api", level, options.log_format or defaults["log_format"])
    if level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


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
    from pypto_serving.setup.host import read_host_facts
    from pypto_serving.setup.locate import locate_model
    from pypto_serving.setup.options import make_options
    from pypto_serving.setup.rules import HOST_PORT
    from pypto_serving.types.start import HostJoin

    try:
        HOST_PORT.parse(address)
    except ValueError:
        raise ConfigError(f"HOST:PORT is {address}, but must be {HOST_PORT.allowed}") from None
    form = make_options({"log_format": log_format}).log_format
    configure_logs("join", "info", form)
    for number in STOP_SIGNALS:
        signal.signal(number, _exit)
    host = read_host_facts()
    start = HostJoin(
        address=address,
        secret_file=str(join_secret_file or ""),
        model=str(locate_model(model)),
        cache_dir=host.cache_dir,
        nodes=host.nodes,
        num_threads=num_threads or host.num_cpus,
        log_format=form,
    )
    join_again(start, lambda: typer.echo(json.dumps({"event": "joined", "address": address, "pid": os.getpid()})))
