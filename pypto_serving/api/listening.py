"""Where the server listens: a TCP port or a Unix socket, with or without TLS."""

from __future__ import annotations

import socket
import ssl
import stat
from pathlib import Path

from pypto_serving.types.config import ServerConfig

READ_TIMEOUT_S = 120.0
"""A client that takes no data for so long is cut off."""


def listen_at(server: ServerConfig) -> socket.socket:
    """Bind the socket of a server. Raises OSError if nothing can listen there."""
    return bind_unix(server.uds) if server.uds else bind(server.host, server.port)


def bind(host: str, port: int) -> socket.socket:
    """Bind a TCP socket, whose connections end when their client takes no data for READ_TIMEOUT_S.

    Raises OSError if nothing can listen there.
    """
    info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = info[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(READ_TIMEOUT_S * 1000))
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def bind_unix(path: str) -> socket.socket:
    """Bind a Unix socket; who may connect follows from the umask. A socket that nobody listens on is replaced.

    Raises OSError if anything else is at `path`, or nothing can be made there.
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
    """Close the socket of a server, and remove the file of a Unix socket."""
    listening.close()
    if server.uds:
        Path(server.uds).unlink(missing_ok=True)


def _is_left_behind(path: str) -> bool:
    """Return whether a server that ended left its socket at `path`."""
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
    """Return what TLS needs, None without it. Raises OSError if certificate or key cannot be used."""
    if not server.ssl_certfile:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, server)
    return context


def load_certificate(context: ssl.SSLContext, server: ServerConfig) -> None:
    """Use the certificate in the server's files for new connections. Raises OSError; nobody is asked for a password."""
    context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile or None, password=lambda: "")
