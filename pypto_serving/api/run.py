"""Run the application: bind, serve, drain on the first signal, stop on the second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette

from pypto_serving.api.batch.batches import Batches
from pypto_serving.api.http.connection import HEAD_TIMEOUT_S, BoundedProtocol
from pypto_serving.api.http.gate import Gate, RefusalLog, places
from pypto_serving.api.http.listening import close, listen_at, load_certificate, tell, tls_context
from pypto_serving.api.reading.reading import Reading
from pypto_serving.api.service import Service
from pypto_serving.threads import start_task
from pypto_serving.types.config import ServerConfig
from pypto_serving.util import counted

logger = logging.getLogger("pypto_serving.api")

CLOSE_TIMEOUT_S = 2
KEEP_ALIVE_S = 5
"""Limit of the time from an answer to the next request, or to the end of a body that was answered before its end."""
TICK_S = 1.0
BACKLOG = 2048
OnBound = Callable[[int], None]


class ApiServer:
    """Serves HTTP on one socket. All methods must be called in the thread of its event loop.

    While draining, it still listens: new requests get a 503 with Retry-After, and /health reports the drain.
    """

    def __init__(self, app: Starlette, server: ServerConfig) -> None:
        self._service: Service = app.state.service
        self._reading: Reading = app.state.reading
        self._batches: Batches | None = app.state.batches
        self._config = server
        self._tls = tls_context(server)
        self._socket = listen_at(server)
        self._drain_timeout_s = server.drain_timeout_s
        self._drain: asyncio.Task[None] | None = None
        clock = time.monotonic
        self._refusals = RefusalLog(clock)
        fitting = places(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._gate = Gate(fitting, self._service.serving.max_body_bytes, clock, self._refused)
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                http=self._new_protocol,  # type: ignore[arg-type]
                ws="none",
                access_log=False,
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            ),
            self._tls,
        )

    def _new_protocol(self, **uvicorns: Any) -> BoundedProtocol:
        return BoundedProtocol(gate=self._gate, **uvicorns)

    def _refused(self, status: int, reason: str) -> None:
        """Count and log a request that was refused by its connection."""
        self._service.metrics.count_response(status)
        self._refusals.note(status, reason)

    @property
    def port(self) -> int:
        """Return the bound port, which the system chose for port 0; 0 for a Unix socket."""
        return 0 if self._socket.family == socket.AF_UNIX else int(self._socket.getsockname()[1])

    async def run(self, on_bound: OnBound) -> None:
        """Serve until stopped; call `on_bound(port)` when connections are accepted."""
        self._server.on_started = lambda: on_bound(self.port)
        if self._batches is not None:
            self._batches.start()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._drain is not None:
                self._drain.cancel()
            close(self._socket, self._config)
            if self._batches is not None:
                await self._batches.close()
            await self._reading.close()
            if self._service.tracing is not None:
                await self._service.tracing.aclose()

    @property
    def reloads(self) -> bool:
        """Return whether the server has files for `reload` to read."""
        return bool(self._service.keys.file) or self._tls is not None

    def reload(self) -> None:
        """Read the file of API keys and the certificate again; open connections continue."""
        if self._service.keys.file:
            self._service.keys.reload()
        if self._tls is not None:
            self._reload_certificate(self._tls)

    def _reload_certificate(self, tls: ssl.SSLContext) -> None:
        try:
            tls_context(self._config)  # test with a new context: a bad pair must not spoil the one in use
            load_certificate(tls, self._config)
        except OSError as error:
            logger.warning("%s cannot be used, and stays as it was: %s", self._config.ssl_certfile, error)
        else:
            logger.info("read the certificate %s", self._config.ssl_certfile)

    def stop(self) -> None:
        """Drain: admit no more requests, finish the admitted ones, then end. A second call ends at once."""
        if self._drain is None:
            tell("STOPPING=1")
            if left := self._service.admission.in_flight:
                wait_s = self._drain_timeout_s
                logger.info("draining: %s left, at most %g s; stop again to end now", counted(left, "request"), wait_s)
            self._service.admission.drain()
            self._drain = self._start("drain", self._drain_then_exit())
        else:
            logger.warning("ending now, with a 503 for %s", counted(self._service.admission.in_flight, "request"))
            self._service.engine.give_up_all()
            self._drain.cancel()
            self._drain = self._start("end", self._exit())

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return start_task(name, work, lambda error: self._server.exit())

    async def _drain_then_exit(self) -> None:
        try:
            await asyncio.wait_for(self._service.admission.wait_idle(), self._drain_timeout_s)
        except TimeoutError:
            left = counted(self._service.admission.in_flight, "request")
            logger.warning("ending after %g s, with a 503 for %s that did not finish", self._drain_timeout_s, left)
            self._service.engine.give_up_all()
        await self._exit()

    async def _exit(self) -> None:
        """Answer requests that are still being read with a 503; disconnect clients that do not accept it in time."""
        await self._reading.close()
        self._server.exit()


async def serve(app: Starlette, server: ServerConfig, on_bound: OnBound) -> None:
    """Serve `app` until SIGTERM or SIGINT; on SIGHUP reload keys and certificate. Raises OSError if it cannot bind.

    Port 0 takes a free port; `on_bound` gets its number, or 0 for a Unix socket. Must be called in the main thread,
    where signals are handled; afterwards they are ignored.
    """
    running = ApiServer(app, server)
    loop = asyncio.get_running_loop()
    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT), running.stop)
    if running.reloads:  # without files to reload, SIGHUP (a closed terminal) ends the server
        handlers[signal.SIGHUP] = running.reload
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        await running.run(on_bound)
    finally:
        ignore_signals(handlers)


def ignore_signals(numbers: Iterable[signal.Signals]) -> None:
    """Ignore signals that the running loop handles: this process is about to end, and has nothing to do for them."""
    for number in numbers:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


class _Uvicorn(uvicorn.Server):
    """Uvicorn's server without its signal handlers; reports its start, and wakes rarely while idle."""

    on_started: Callable[[], None] | None = None

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._exit = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen like uvicorn, but also on Unix sockets, and with a short timeout for TLS handshakes."""
        assert sockets is not None
        [listening], loop = sockets, asyncio.get_running_loop()
        create: Any = loop.create_unix_server if listening.family == socket.AF_UNIX else loop.create_server
        patience = {} if self._tls is None else {"ssl_handshake_timeout": HEAD_TIMEOUT_S}
        server = await create(self._new_protocol, sock=listening, ssl=self._tls, backlog=BACKLOG, **patience)
        self.servers = [server]
        self.started = True
        if self.on_started is not None:
            self.on_started()

    def _new_protocol(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(config=self.config, server_state=self.server_state, app_state={})  # type: ignore[call-arg]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for connections to end. After CLOSE_TIMEOUT_S, close stalled ones; then uvicorn cancels all others."""
        cut = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._cut_stalled)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _cut_stalled(self) -> None:
        """Close connections with unfinished answers, so that these end as if the clients had disconnected."""
        connections = cast(list[BoundedProtocol], list(self.server_state.connections))
        if count := sum([connection.cut() for connection in connections]):
            left = counted(count, "connection")
            logger.warning("cut %s, where the client took no data for %g s", left, CLOSE_TIMEOUT_S)

    def exit(self) -> None:
        """Leave the main loop."""
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        """Wake once a second, to update the date header; uvicorn's own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), TICK_S)
