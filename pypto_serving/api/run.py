"""Running the application: bind, serve, drain on the first signal, stop on the second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from pypto_serving.api.service import Service
from pypto_serving.util import counted

logger = logging.getLogger("pypto_serving.api")

DRAIN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 2
TICK_S = 1.0
OnBound = Callable[[int], None]


class ApiServer:
    """One HTTP server on one socket. All methods belong to its event loop's thread.

    While it drains it still listens: new requests get a 503 with Retry-After and /health says so.
    """

    def __init__(self, app: FastAPI, host: str, port: int, drain_timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        self._service: Service = app.state.service
        self._socket = bind(host, port)
        self._drain_timeout_s = drain_timeout_s
        self._drain: asyncio.Task[None] | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                access_log=False,
                lifespan="off",
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
            )
        )

    @property
    def port(self) -> int:
        """The real port, also where 0 was asked for."""
        return int(self._socket.getsockname()[1])

    async def run(self, on_bound: OnBound) -> None:
        """Serve until stopped; `on_bound(port)` is called once connections are taken."""
        self._server.on_started = lambda: on_bound(self.port)
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._drain is not None:
                self._drain.cancel()
            self._socket.close()

    def stop(self) -> None:
        """First call: take no more requests, finish the admitted ones, end. Second call: end now."""
        if self._drain is None:
            if left := self._service.admission.in_flight:
                wait_s = self._drain_timeout_s
                logger.info("draining: %s left, at most %g s; stop again to end now", counted(left, "request"), wait_s)
            self._service.admission.drain()
            self._drain = asyncio.get_running_loop().create_task(self._drain_then_exit())
        else:
            logger.warning("ending now, with a 503 for %s", counted(self._service.admission.in_flight, "request"))
            self._end_now()

    async def _drain_then_exit(self) -> None:
        try:
            await asyncio.wait_for(self._service.admission.wait_idle(), self._drain_timeout_s)
            self._server.exit()
        except TimeoutError:
            left = counted(self._service.admission.in_flight, "request")
            logger.warning("ending after %g s, with a 503 for %s that did not finish", self._drain_timeout_s, left)
            self._end_now()

    def _end_now(self) -> None:
        """Who waits is told; whoever does not take it within CLOSE_TIMEOUT_S is cut off."""
        self._service.engine.give_up_all()
        self._server.exit()


async def serve(
    app: FastAPI, host: str, port: int, on_bound: OnBound, *, drain_timeout_s: float = DRAIN_TIMEOUT_S
) -> None:
    """Serve `app` until SIGTERM or SIGINT; raises OSError where it cannot bind.

    Port 0 takes a free one, which `on_bound` is told. To be called in the main thread, whose signals it handles.
    """
    server = ApiServer(app, host, port, drain_timeout_s)
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, server.stop)
    try:
        await server.run(on_bound)
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket; raises OSError where nothing can listen there."""
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = info[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling, with word of its start, and quiet while nothing happens."""

    on_started: Callable[[], None] | None = None

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.on_started is not None:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def exit(self) -> None:
        """Leave the main loop."""
        self.should_exit = True
        self._exit.set()

    async def main_loop(self) -> None:
        """As uvicorn's, but awake once a second, to write the date, instead of ten times."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), TICK_S)
