"""Typed channels between our processes: msgspec over ZeroMQ, an in-memory twin, and the control pipe of a child.

A channel connects two ends; a message sent on one arrives on the other, in order. Each end speaks at least once
a heartbeat; a child's control pipe tells at once that the other side is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Channel(Protocol[T_co]):
    """One end of a channel; T_co is the union of messages that it receives."""

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the other end; never blocks."""

    def receive(self, timeout_s: float = 0.0) -> T_co | None:
        """The next message, or None when none comes in time."""

    def close(self) -> None:
        """Drop this end; unsent messages are lost."""


class ZmqChannel(Generic[T]):
    """A PAIR socket over `ipc://` or `tcp://`. One end binds, the other connects; use it from one thread."""

    def __init__(self, address: str, receives: Any, *, bind: bool) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.socket.set_hwm(0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)
        if bind:
            self.socket.bind(address)
        else:
            self.socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._encoder.encode(message), zmq.NOBLOCK, copy=True)

    def receive(self, timeout_s: float = 0.0) -> T | None:
        if timeout_s > 0 and not self.socket.poll(math.ceil(timeout_s * 1000)):
            return None
        try:
            return self._decoder.decode(self.socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None

    def close(self, linger_s: float = 0.0) -> None:
        self.socket.close(round(linger_s * 1000))


class MemoryChannel(Generic[T]):
    """Both ends in one process. Messages are encoded and decoded as on the real wire."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes], receives: Any) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receives)

    @classmethod
    def pair(cls, first_receives: Any, second_receives: Any) -> tuple[MemoryChannel[Any], MemoryChannel[Any]]:
        """Two connected ends."""
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


def ipc_address(name: str) -> str:
    """A fresh `ipc://` address; only this user can reach it."""
    return f"ipc://{tempfile.mkdtemp(prefix='pypto-')}/{name}"


def remove_address(address: str) -> None:
    """Delete the socket file of an `ipc://` address and its directory."""
    path = Path(address.removeprefix("ipc://"))
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


class ChildProgress(msgspec.Struct, frozen=True, tag="progress"):
    """`done` of `total` units of a phase of starting."""

    phase: str
    done: int
    total: int


class ChildFault(msgspec.Struct, frozen=True, tag="fault"):
    """Why a child is about to end."""

    message: str
    exit_code: int


_CHILD_MESSAGES = msgspec.json.Decoder(ChildProgress | ChildFault)


class Child:
    """A process started by `python -m module`, and our end of its control pipe.

    The child reads its configuration from the pipe, reports progress and faults over it, and ends when it is
    closed; the end of the stream tells us at once that the child is gone.
    """

    def __init__(self, module: str, start: msgspec.Struct) -> None:
        self.pipe, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", module, str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._buffer = b""
        self.gone = False
        with contextlib.suppress(OSError):
            self.pipe.sendall(msgspec.json.encode(start) + b"\n")
        self.pipe.setblocking(False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def messages(self) -> list[ChildProgress | ChildFault]:
        """What the child said since the last call; sets `gone` at the end of the stream."""
        while not self.gone:
            try:
                data = self.pipe.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.gone = not data
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [_CHILD_MESSAGES.decode(line) for line in lines if line]

    def end(self, patience_s: float) -> int:
        """Wait for the child's end, then insist; returns its exit code."""
        try:
            code = self.process.wait(patience_s) if patience_s > 0 else None
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            self.process.kill()
            code = self.process.wait()
        self.pipe.close()
        return code


class Parent(Generic[T]):
    """The child's end of its control pipe. Ends this process when the parent does."""

    def __init__(self, fd: int, start_type: type[T]) -> None:
        self._pipe = socket.socket(fileno=fd)
        self._stream = self._pipe.makefile("rb")
        self.start: T = msgspec.json.decode(self._stream.readline(), type=start_type)
        ignore_terminal_signals()
        die_with_parent()
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def _watch(self) -> None:
        while self._stream.read(1):
            pass
        os._exit(0)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._say(ChildProgress(phase, done, total))

    def fault(self, message: str, exit_code: int) -> None:
        self._say(ChildFault(message, exit_code))

    def _say(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):
            self._pipe.sendall(msgspec.json.encode(message) + b"\n")


def ignore_terminal_signals() -> None:
    """Ctrl-C and service managers signal whole groups; children wait for their parent's word instead."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def die_with_parent() -> None:
    """On Linux, have the kernel kill this process, even a stopped or stuck one, when its parent's thread ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
