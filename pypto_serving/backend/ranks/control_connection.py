"""The connection over which two hosts report progress and faults, and notice that the other is gone."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress

import msgspec

from pypto_serving.errors import PyptoError
from pypto_serving.ipc import FRAME_BYTES, SocketChannel
from pypto_serving.processes import ChildFault, ChildProgress
from pypto_serving.types.config import FaultConfig
from pypto_serving.types.start import FromHost, HostHeartbeat

LINGER_S = 1.0
MAX_MESSAGE_BYTES = 1 << 20
"""Longest message of another host."""


class DamageError(PyptoError):
    """The other host sent bytes that are no message."""

    def __init__(self) -> None:
        super().__init__("sent bytes that are no message")


class HostChannel(SocketChannel[FromHost]):
    """A channel to another host: `receive` raises DamageError for bytes that are no message."""

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

    `pipe` is readable when there is something new. `gone` is empty until the other host has closed the connection, or
    was silent for too long.
    """

    def __init__(self, channel: HostChannel, faults: FaultConfig) -> None:
        self._channel, self._faults = channel, faults
        self._inbox: deque[ChildProgress | ChildFault] = deque()
        self._outbox: deque[msgspec.Struct] = deque()
        self.pipe, self._wake = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
        self.gone = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="host-control", daemon=True)
        self._thread.start()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; any thread may."""
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

    def _receive(self) -> str:
        """Take the messages that have arrived; return why the other host is gone, or an empty string."""
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
        with suppress(BlockingIOError):  # then it has not been read since
            os.eventfd_write(self.pipe, 1)
