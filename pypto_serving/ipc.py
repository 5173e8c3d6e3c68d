"""Typed channels between our processes: msgspec over Unix sockets.

Messages sent on one end of a channel arrive on the other end, in order. Each end sends at least once per heartbeat.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import time
from typing import Any, Generic, Protocol, TypeVar

import msgspec

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FRAME_BYTES = 4


class Channel(Protocol[T_co]):
    """One end of a channel; T_co is the union of the messages that it receives."""

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the other end; never blocks."""

    def receive(self, timeout_s: float = 0.0) -> T_co | None:
        """Return the next message, or None if none arrives in time."""

    def close(self) -> None:
        """Close this end; unsent messages are lost."""


class SocketChannel(Generic[T]):
    """Owns one end of a connected Unix socket, for one thread. A frame is 4 bytes of length, then a message.

    Bytes that the socket does not accept at once are kept until `flush`. A caller that sleeps must poll for `events`.
    """

    def __init__(self, end: socket.socket, receives: Any) -> None:
        end.setblocking(False)
        self.socket = end
        self.gone = False
        self._inbox, self._outbox = bytearray(), bytearray()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    @classmethod
    def pair(cls, receives: Any) -> tuple[SocketChannel[Any], socket.socket]:
        """Make a channel, and the end that a child inherits."""
        ours, theirs = socket.socketpair()
        return cls(ours, receives), theirs

    @property
    def events(self) -> int:
        """Return the events to poll the socket for."""
        return select.POLLIN | select.POLLOUT if self._outbox else select.POLLIN

    def send(self, message: msgspec.Struct) -> None:
        data = self._encoder.encode(message)
        self._outbox += len(data).to_bytes(FRAME_BYTES, "little") + data
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket accepts; drop everything if the peer is gone."""
        try:
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            return
        except OSError:
            self._outbox.clear()

    def receive(self, timeout_s: float = 0.0) -> T | None:
        deadline_s = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
        while (frame := self._next_frame()) is None:
            if not self._read() and not self._wait(deadline_s):
                return None
        return self._decoder.decode(frame)

    def _next_frame(self) -> bytes | None:
        end = FRAME_BYTES + int.from_bytes(self._inbox[:FRAME_BYTES], "little")
        if len(self._inbox) < max(end, FRAME_BYTES):
            return None
        frame = bytes(memoryview(self._inbox)[FRAME_BYTES:end])
        del self._inbox[:end]
        return frame

    def _read(self) -> bool:
        """Read the data that has arrived; return False if there is none."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self.gone = not data
        self._inbox += data
        return bool(data)

    def _wait(self, deadline_s: float) -> bool:
        """Sleep until data arrives; return False at the deadline, or if the peer is gone."""
        left_s = deadline_s - time.monotonic() if deadline_s else 0.0
        if left_s <= 0:
            return False
        if self.gone:
            time.sleep(left_s)
            return False
        poller = select.poll()
        poller.register(self.socket, self.events)
        poller.poll(math.ceil(left_s * 1000))
        self.flush()
        return True

    def linger(self, timeout_s: float) -> None:
        """Send the last messages; those not sent within `timeout_s` are lost."""
        with contextlib.suppress(OSError):
            if timeout_s and self._outbox:
                self.socket.settimeout(timeout_s)
                self.socket.sendall(self._outbox)

    def close(self, linger_s: float = 0.0) -> None:
        """Close this end, after `linger`."""
        self.linger(linger_s)
        self.socket.close()
