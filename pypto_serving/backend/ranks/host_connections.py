"""The connections of two hosts: a handshake on each; one of them carries progress, faults and heartbeats.

In the handshake, both prove that they know a secret, which is never sent:

    serving host   protocol, nonce (32 bytes)
    joining host   head: protocol, purpose and life of the connection, nonce; then HMAC(secret, "join", nonces, head)
    serving host   HMAC(secret, "serve", nonces, head)

Later messages are neither encrypted nor authenticated.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from pypto_serving.errors import PyptoError
from pypto_serving.ipc import FRAME_BYTES, SocketChannel
from pypto_serving.processes import ChildFault, ChildProgress
from pypto_serving.threads import start_thread
from pypto_serving.types.config import FaultConfig
from pypto_serving.types.start import FromHost, HostHeartbeat

HANDSHAKE_S = 5.0
LATE = f"it did not greet within {HANDSHAKE_S:.0f} s"
LIFE_BYTES = 16
LINGER_S = 1.0
MAX_MESSAGE_BYTES = 1 << 20
"""Limit of a message's length."""

_PROTOCOL = b"pypto-serving hosts 1"
_NONCE_BYTES = _MAC_BYTES = 32
_BACKLOG = 1024
_HEAD = struct.Struct(f"{len(_PROTOCOL)}s16s{LIFE_BYTES}s{_NONCE_BYTES}s")
_CLOSED = "it closed the connection"


class HandshakeError(PyptoError):
    """The other side of a connection did not prove that it knows the secret."""


class Purpose(NamedTuple):
    """The use of a connection: a name of `Topology.connections` and a life, or CONTROL."""

    name: str
    life: bytes = bytes(LIFE_BYTES)


CONTROL = Purpose("control")


class Handshake:
    """Owns a new connection. Within HANDSHAKE_S, its other side must prove that it knows the secret. Never blocks."""

    def __init__(self, end: socket.socket, name: str) -> None:
        """Send our greeting. Raises OSError."""
        self.end, self.name, self.deadline_s = end, name, time.monotonic() + HANDSHAKE_S
        self._nonce, self._received = secrets.token_bytes(_NONCE_BYTES), b""
        set_no_delay(end)
        end.setblocking(False)
        end.sendall(_PROTOCOL + self._nonce)  # never blocks: it fits a new send buffer

    def read(self, secret: bytes) -> Purpose | None:
        """Read the data so far; return the purpose once the secret is proven. Raises HandshakeError or OSError."""
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
    """Connect to the host that listens on HOST:PORT, for `purpose`. Raises HandshakeError or OSError."""
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
    """Send small messages at once (TCP_NODELAY)."""
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
    """Read exactly `size` bytes before the deadline.

    Raises HandshakeError if they do not begin with `first`.
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
                f"it answers {data!r}, so it is not a serving host of this version; give the option join-address of one"
            )
    return data


class DamageError(PyptoError):
    """The other host sent bytes that are not a valid message."""

    def __init__(self) -> None:
        super().__init__("sent bytes that are not a message")


class HostChannel(SocketChannel[FromHost]):
    """A channel to another host: `receive` raises DamageError for bytes that are not a valid message."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, FromHost)

    def receive(self, timeout_s: float = 0.0) -> FromHost | None:
        try:
            return super().receive(timeout_s)
        except msgspec.DecodeError:
            raise DamageError from None

    def _next_frame(self) -> bytes | None:
        if int.from_bytes(self._inbox[:FRAME_BYTES], "little") > MAX_MESSAGE_BYTES:
            raise DamageError
        return super()._next_frame()

    def _wait(self, deadline_s: float) -> bool:
        return not self.gone and super()._wait(deadline_s)


class ControlConnection:
    """Owns the control connection to the other host, and a thread that sends heartbeats and receives.

    `pipe` is readable when there are new messages. `gone` is "" until the other host has closed the connection, or was
    silent for too long; then it says which.
    """

    def __init__(self, channel: HostChannel, faults: FaultConfig) -> None:
        self._channel, self._faults = channel, faults
        self._inbox: deque[ChildProgress | ChildFault] = deque()
        self._outbox: deque[msgspec.Struct] = deque()
        self.pipe, self._wake = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        self.gone = ""
        self._closing = False
        self._thread = start_thread("host-control", self._run, self._fail)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Any thread may call this."""
        self._outbox.append(message)
        os.eventfd_write(self._wake, 1)

    def messages(self) -> list[ChildProgress | ChildFault]:
        """Return the messages since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.pipe)
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def close(self) -> None:
        """Send the remaining messages, and close the connection."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._send()
        self._channel.close(linger_s=LINGER_S)

    def _run(self) -> None:
        self._heard_s = next_heartbeat_s = time.monotonic()
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        while not self.gone and not self._closing:
            if time.monotonic() >= next_heartbeat_s:
                self._channel.send(HostHeartbeat())
                next_heartbeat_s = time.monotonic() + self._faults.heartbeat_s
            poller.register(self._channel.socket, self._channel.events)
            poller.poll(max(1, (next_heartbeat_s - time.monotonic()) * 1000))
            self._send()
            try:
                self.gone = self._receive()
            except DamageError as error:
                self.gone = str(error)
        self._notify()

    def _fail(self, error: BaseException) -> None:
        self.gone = f"cannot be heard any more: {error}"
        self._notify()

    def _receive(self) -> str:
        """Take the messages that have arrived; return why the other host is gone, or ""."""
        while (message := self._channel.receive()) is not None:
            self._heard_s = time.monotonic()
            if isinstance(message, ChildProgress | ChildFault):
                self._inbox.append(message)
                self._notify()
        if self._channel.gone:
            return "closed the connection"
        if time.monotonic() - self._heard_s > self._faults.silent_s:
            return f"was silent for {self._faults.silent_s:.0f} s"
        return ""

    def _send(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._outbox:
            self._channel.send(self._outbox.popleft())
        self._channel.flush()

    def _notify(self) -> None:
        with suppress(BlockingIOError):  # the counter is full, so the pipe is readable already
            os.eventfd_write(self.pipe, 1)
