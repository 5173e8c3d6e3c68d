"""How two hosts make sure of each other on every connection: both prove that they know a secret, which is never sent.

    serving host   nonce (32 bytes)
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

GREETING_S = 5.0
LIFE_BYTES = 16

_PROTOCOL = b"pypto-serving hosts 1"
_NONCE_BYTES = _MAC_BYTES = 32
_HEAD = struct.Struct(f"{len(_PROTOCOL)}s16s{LIFE_BYTES}s{_NONCE_BYTES}s")


class GreetingError(PyptoError):
    """The other side of a connection did not prove that it knows the secret."""


class Purpose(NamedTuple):
    """What a connection is for: a name of `Topology.connections` and a life, or CONTROL."""

    name: str
    life: bytes = bytes(LIFE_BYTES)


CONTROL = Purpose("control")


def welcome(end: socket.socket, secret: bytes) -> Purpose:
    """Greet whoever connected, and return what for. Raises GreetingError or OSError."""
    deadline_s, nonce = time.monotonic() + GREETING_S, secrets.token_bytes(_NONCE_BYTES)
    end.settimeout(GREETING_S)
    end.sendall(nonce)
    head = _read(end, _HEAD.size, deadline_s)
    proof = _read(end, _MAC_BYTES, deadline_s)
    if not hmac.compare_digest(proof, _mac(secret, b"join", nonce, head)):
        end.sendall(bytes(_MAC_BYTES))
        raise GreetingError("it does not know the secret")
    protocol, name, life, _ = _HEAD.unpack(head)
    if protocol != _PROTOCOL:
        raise GreetingError("it is of another version")
    end.sendall(_mac(secret, b"serve", nonce, head))
    return Purpose(name.rstrip(b"\0").decode("ascii", "replace"), life)


def introduce(end: socket.socket, secret: bytes, purpose: Purpose) -> None:
    """Say to the host that one has connected to what for. Raises GreetingError or OSError."""
    deadline_s = time.monotonic() + GREETING_S
    end.settimeout(GREETING_S)
    nonce = _read(end, _NONCE_BYTES, deadline_s)
    own = secrets.token_bytes(_NONCE_BYTES)
    head = _HEAD.pack(_PROTOCOL, purpose.name.encode(), purpose.life, own)
    end.sendall(head + _mac(secret, b"join", nonce, head))
    if not hmac.compare_digest(_read(end, _MAC_BYTES, deadline_s), _mac(secret, b"serve", nonce, head)):
        raise GreetingError("it does not know the secret")


def listen(address: str) -> socket.socket:
    """Listen on HOST:PORT. Raises OSError."""
    family, kind, protocol, _, where = _resolve(address)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def connect(address: str, secret: bytes, purpose: Purpose) -> socket.socket:
    """Connect to the host that listens on HOST:PORT, for a purpose. Raises GreetingError or OSError."""
    family, kind, protocol, _, where = _resolve(address)
    end = socket.socket(family, kind, protocol)
    try:
        end.settimeout(GREETING_S)
        end.connect(where)
        swift(end)
        introduce(end, secret, purpose)
    except (OSError, GreetingError):
        end.close()
        raise
    return end


def swift(end: socket.socket) -> None:
    """Let small messages leave at once."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _resolve(address: str) -> tuple[int, int, int, str, Any]:
    host, _, port = address.rpartition(":")
    return socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def _mac(secret: bytes, side: bytes, nonce: bytes, head: bytes) -> bytes:
    return hmac.digest(secret, side + nonce + head, "sha256")


def _read(end: socket.socket, size: int, deadline_s: float) -> bytes:
    """Read exactly `size` bytes until the deadline, however slowly they come."""
    data = b""
    while len(data) < size:
        if (left_s := deadline_s - time.monotonic()) <= 0:
            raise GreetingError(f"it did not greet within {GREETING_S:.0f} s")
        end.settimeout(left_s)
        try:
            more = end.recv(size - len(data))
        except TimeoutError:
            continue
        if not more:
            raise ConnectionError("it closed the connection")
        data += more
    return data
