"""An in-memory twin of SocketChannel, for loops of core and worker without processes."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class MemoryChannel(Generic[T]):
    """Both ends in one process. Messages are encoded and decoded as on the real wire."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes], receives: Any) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    @classmethod
    def pair(cls, first_receives: Any, second_receives: Any) -> tuple[MemoryChannel[Any], MemoryChannel[Any]]:
        """Make two connected ends."""
        one: deque[bytes] = deque()
        two: deque[bytes] = deque()
        return MemoryChannel(one, two, first_receives), MemoryChannel(two, one, second_receives)

    def send(self, message: msgspec.Struct) -> None:
        self._outbox.append(self._encoder.encode(message))

    def receive(self, timeout_s: float = 0.0) -> T | None:
        return self._decoder.decode(self._inbox.popleft()) if self._inbox else None

    def close(self) -> None:
        self._inbox.clear()
        self._outbox.clear()
