"""Where the server listens: a TCP port, a Unix socket or a socket of the service manager, with or without TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from pypto_serving.engine.client import Health
from pypto_serving.errors import ConfigError
from pypto_serving.types.config import ServerConfig

READ_TIMEOUT_S = 120.0
"""A client that accepts no data for this time is disconnected."""
FIRST_FD = 3
"""The file descriptor of the first socket that a service manager hands over; see sd_listen_fds(3)."""
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)


def listen_at(server: ServerConfig) -> socket.socket:
    """Bind the server's socket, or take the service manager's. Raises OSError if the address cannot be used."""
    if (given := handed_over()) is not None:
        return given
    return bind_unix(server.uds) if server.uds else bind(server.host, server.port)


def handed_over() -> socket.socket | None:
    """Return a copy of the socket that the service manager hands to this process, or None.

    Raises ConfigError if there are several sockets, or if the socket accepts no connections.
    """
    if not _is_handed_over():
        return None
    if (count := os.environ.get("LISTEN_FDS")) != "1":
        raise ConfigError(f"LISTEN_FDS is {count}, but the service manager must hand over one socket")
    try:
        given = socket.socket(fileno=os.dup(FIRST_FD))
        listens = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError:
        raise ConfigError("LISTEN_FDS is 1, but the service manager handed over something else than a socket") from None
    if not listens or given.type != socket.SOCK_STREAM or given.family not in _FAMILIES:
        given.close()
        raise ConfigError("the socket of the service manager takes no connections; give it a ListenStream")
    if given.family != socket.AF_UNIX:
        _give_up_silent_clients(given)
    return given


def _is_handed_over() -> bool:
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def address_of(given: socket.socket) -> dict[str, str | int]:
    """Return the address of a socket as server options: `uds`, or `host` and `port`."""
    name = given.getsockname()
    if given.family == socket.AF_UNIX:
        return {"uds": name if isinstance(name, str) else "@" + os.fsdecode(name[1:])}
    return {"host": name[0], "port": name[1]}


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket whose connections end when a client accepts no data for READ_TIMEOUT_S.

    Raises OSError if the address cannot be used.
    """
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = info[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _give_up_silent_clients(bound)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def _give_up_silent_clients(listening: socket.socket) -> None:
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_TIMEOUT_S * 1000))


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket, with permissions by the umask. Replace a socket on which nobody listens.

    Raises OSError if `path` is anything else, or if no socket can be created there.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            Path(path).unlink()
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    return bound


def close(listening: socket.socket, server: ServerConfig) -> None:
    """Close the server's socket. Remove a Unix socket's file, unless the service manager owns it."""
    listening.close()
    if server.uds and not _is_handed_over():
        Path(server.uds).unlink(missing_ok=True)


def _is_left_behind(path: str) -> bool:
    """Return whether `path` is a socket that an ended server left behind."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context, or None without TLS. Raises OSError if certificate or key cannot be used."""
    if not server.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, server)
    return context


def load_certificate(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Use the certificate in the server's files for new connections. Raises OSError, also for encrypted keys."""
    context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile or None, password=lambda: "")


logger = logging.getLogger("pypto_serving.api")

PATIENCE_S = 1.0
PETS = 2
"""Send this many signs of life per watchdog interval of the service manager."""


def tell(state: str, patience_s: float = PATIENCE_S) -> None:
    """Send a line such as READY=1 to the service manager, if there is one; wait at most `patience_s`."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    path = "\0" + address[1:] if address[0] == "@" else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(patience_s)
            sender.sendto(state.encode(), path)
    except OSError as error:
        logger.warning("the service manager at %s cannot be told %s: %s", address, state, error)


async def pet_watchdog(health: Callable[[], Health]) -> None:
    """If the service manager expects signs of life, send them as long as the engine core is alive."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    try:
        wait_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except (ValueError, OverflowError):
        return
    while wait_s > 0:
        if health().status not in ("silent", "dead"):
            tell("WATCHDOG=1", 0)  # do not wait: a manager that does not read must not block the event loop
        await asyncio.sleep(wait_s / PETS)
