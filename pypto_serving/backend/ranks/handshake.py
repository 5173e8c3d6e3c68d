"""The handshake of two hosts on each connection: both prove that they know a secret, which is never sent.

    serving host   protocol, nonce (32 bytes)
    joining host   head: protocol, purpose and life of the connection, nonce; then HMAC(secret, "join", nonces, head)
    serving host   HMAC(secret, "serve", nonces, head)

What follows is neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import Any, NamedTuple

from pypto_serving.errors import PyptoError

HANDSHAKE_S = 5.0
LATE = f"it did not greet within {HANDSHAKE_S:.0f} s"
LIFE_BYTES = 16

_PROTOCOL = b"pypto-serving hosts 1"
_NONCE_BYTES = _MAC_BYTES = 32
_BACKLOG = 1024
_HEAD = struct.Struct(f"{len(_PROTOCOL)}s16s{LIFE_BYTES}s{_NONCE_BYTES}s")
_CLOSED = "it closed the connection"


class HandshakeError(PyptoError):
    """The other side of a connection did not prove that it knows the secret."""


class Purpose(NamedTuple):
    """What a connection is for: a name of `Topology.connections` and a life, or CONTROL."""

    name: str
    life: bytes = bytes(LIFE_BYTES)


CONTROL = Purpose("control")


class Handshake:
    """Owns a connection whose other side has HANDSHAKE_S to prove that it knows the secret. It never blocks."""

    def __init__(self, end: socket.socket, name: str) -> None:
        """Raises OSError."""
        self.end, self.name, self.deadline_s = end, name, time.monotonic() + HANDSHAKE_S
        self._nonce, self._received = secrets.token_bytes(_NONCE_BYTES), b""
        set_no_delay(end)
        end.setblocking(False)
        end.sendall(_PROTOCOL + self._nonce)  # which a new connection always takes

    def read(self, secret: bytes) -> Purpose | None:
        """Read what has arrived; return what it connected for once it is proven. Raises HandshakeError or OSError."""
        if not (more := self.end.recv(_HEAD.size + _MAC_BYTES - len(self._received))):
            raise ConnectionError(_CLOSED)
        self._received += more
        if len(self._received) < _HEAD.size + _MAC_BYTES:
            return None
        head, proof = self._received[: _HEAD.size], self._received[_HEAD.size :]
        if not hmac.compare_digest(proof, _mac(secret, b"join", self._nonce, head)):
            self.end.sendall(bytes(_MAC_BYTES))
            raise HandshakeError("it does not know the secret")
        protocol, name, life, _ = _HEAD.unpack(head)
        if protocol != _PROTOCOL:
            raise HandshakeError("it is of another version")
        self.end.sendall(_mac(secret, b"serve", self._nonce, head))
        return Purpose(name.rstrip(b"\0").decode("ascii", "replace"), life)


def prove_secret(end: socket.socket, secret: bytes, purpose: Purpose) -> None:
    """Prove to the serving host that this one knows the secret; check its proof. Raises HandshakeError or OSError."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    end.settimeout(HANDSHAKE_S)
    nonce = _read(end, len(_PROTOCOL) + _NONCE_BYTES, deadline_s, _PROTOCOL)[len(_PROTOCOL) :]
    own = secrets.token_bytes(_NONCE_BYTES)
    head = _HEAD.pack(_PROTOCOL, purpose.name.encode(), purpose.life, own)
    end.sendall(head + _mac(secret, b"join", nonce, head))
    if not hmac.compare_digest(_read(end, _MAC_BYTES, deadline_s), _mac(secret, b"serve", nonce, head)):
        raise HandshakeError("the secrets differ; give both hosts the same")


def listen(address: str) -> socket.socket:
    """Listen on HOST:PORT. Raises OSError."""
    family, kind, protocol, _, where = _resolve(address)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str, secret: bytes, purpose: Purpose) -> socket.socket:
    """Connect to the host that listens on HOST:PORT, for a purpose. Raises HandshakeError or OSError."""
    family, kind, protocol, _, where = _resolve(address)
    end = socket.socket(family, kind, protocol)
    try:
        end.settimeout(HANDSHAKE_S)
        end.connect(where)
        set_no_delay(end)
        prove_secret(end, secret, purpose)
    except (OSError, HandshakeError):
        end.close()
        raise
    return end


def set_no_delay(end: socket.socket) -> None:
    """Let small messages leave at once."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _resolve(address: str) -> tuple[int, int, int, str, Any]:
    host, _, port = address.rpartition(":")
    try:
        return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except UnicodeError:  # a label that is too long, or empty
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None


def _mac(secret: bytes, side: bytes, nonce: bytes, head: bytes) -> bytes:
    return hmac.digest(secret, side + nonce + head, "sha256")


def _read(end: socket.socket, size: int, deadline_s: float, first: bytes = b"") -> bytes:
    """Read exactly `size` bytes until the deadline, however slowly they come.

    Raises HandshakeError where they do not begin with `first`.
    """
    data = b""
    while len(data) < size:
        if (left_s := deadline_s - time.monotonic()) <= 0:
            raise TimeoutError(LATE)
        end.settimeout(left_s)
        try:
            more = end.recv(size - len(data))
        except TimeoutError:
            continue
        if not more:
            raise ConnectionError(_CLOSED)
        data += more
        if data[: len(first)] != first[: len(data)]:
            raise HandshakeError(
                f"what listens there says {data!r}, so it is no serving host of this version; give the option "
                "join-address of one"
            )
    return data
