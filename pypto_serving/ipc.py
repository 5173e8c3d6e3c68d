"""Typed channels between our processes: msgspec over Unix sockets, an in-memory twin, and the control pipe of a child.

A channel connects two ends; messages sent on one arrive on the other, in order. Each end sends at least once per
heartbeat. A child's control pipe closes at once when the other side is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from pypto_serving.errors import EXIT_OK, PyptoError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FRAME_BYTES = 4
TERMINAL_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Terminals and service managers send these to whole groups of processes; children leave them to their parent."""


class Channel(Protocol[T_co]):
    """One end of a channel; T_co is the union of the messages that it receives."""

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the other end; never blocks."""

    def receive(self, timeout_s: float = 0.0) -> T_co | None:
        """Return the next message, or None if none arrives in time."""

    def close(self) -> None:
        """Close this end; unsent messages are lost."""


class SocketChannel(Generic[T]):
    """Owns one end of a connected Unix socket; use it from one thread. A frame is 4 bytes of length, then a message.

    Bytes that the socket does not take at once are kept until `flush`. A caller that sleeps must poll for `events`.
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
        """Send as much as the socket takes; drop everything if the peer is gone."""
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
        """Read what has arrived; return False for nothing."""
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
        """Sleep until something arrives; return False at the deadline. A peer that is gone sends nothing more."""
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

    def close(self, linger_s: float = 0.0) -> None:
        """Close this end; messages not sent within `linger_s` are lost."""
        with contextlib.suppress(OSError):
            if linger_s and self._outbox:
                self.socket.settimeout(linger_s)
                self.socket.sendall(self._outbox)
        self.socket.close()


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


class ChildProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A child has done `done` of `total` units of a phase of its start."""

    phase: str
    done: int
    total: int


class ChildFault(msgspec.Struct, frozen=True, tag="fault"):
    """A child is about to end, because of an error."""

    message: str
    exit_code: int


_CHILD_MESSAGES = msgspec.json.Decoder(ChildProgress | ChildFault)


class Child:
    """A process started by `python -P -m module`, never from the current folder, and our end of its control pipe.

    The child reads its configuration from the pipe, reports progress and faults over it, and ends when the pipe closes.
    When the child is gone, our end of the pipe closes at once. The child inherits `ends`, which are closed here, and
    the file descriptors `shared`, all under the same numbers. Terminal signals never end it: `Parent` ignores
    them, and until then they wait. With `leads`, it leads a process group, in which its own children are, unless they
    lead others. Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        module: str,
        start: msgspec.Struct,
        *ends: socket.socket,
        shared: tuple[int, ...] = (),
        variables: Mapping[str, str] | None = None,
        leads: bool = False,
    ) -> None:
        """`variables` are added to the environment."""
        environment = {**os.environ, **(variables or {})}
        self.pipe, theirs = socket.socketpair()
        inherited = [theirs.fileno(), *(end.fileno() for end in ends), *shared]
        command = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        try:
            with terminal_signals_held():
                self.process = subprocess.Popen(
                    command,
                    pass_fds=inherited,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    process_group=0 if leads else None,
                )
        except OSError:
            self.pipe.close()
            raise
        finally:
            for end in (theirs, *ends):
                end.close()
        self._buffer = b""
        self.gone = False
        with contextlib.suppress(OSError):
            self.pipe.sendall(msgspec.json.encode(start) + b"\n")
        self.pipe.setblocking(False)

    @property
    def pid(self) -> int:
        return self.process.pid

    def messages(self) -> list[ChildProgress | ChildFault]:
        """Return the messages since the last call; set `gone` at the end of the stream."""
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
        """Wait `patience_s` for the child to end, then kill it; return its exit code."""
        try:
            code = self.process.wait(patience_s) if patience_s > 0 else None
        except subprocess.TimeoutExpired:
            code = None
        if code is None:
            self.process.kill()
            code = self.process.wait()
        self.pipe.close()
        return code


class Descendants:
    """Tells when a child, and all processes that it started, have ended. They inherit `end`, which only has to be open.

    `ours` can then be read from.
    """

    def __init__(self) -> None:
        self.ours, self.end = socket.socketpair()

    def ended(self) -> bool:
        """Return True once all of them have ended."""
        poller = select.poll()
        poller.register(self.ours, select.POLLIN)
        return bool(poller.poll(0))

    def kill(self, group: int) -> None:
        """Kill those that are left; all of them are in the process group `group`, so that it is still theirs."""
        if not self.ended():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching."""
        self.ours.close()


class Parent(Generic[T]):
    """The child's end of its control pipe. Ends this process when the parent does.

    A process that forks must have no thread that `watches`: on Linux the kernel ends it as well.
    """

    def __init__(self, fd: int, start_type: type[T], watches: bool = True) -> None:
        self._pipe = socket.socket(fileno=fd)
        self._stream = self._pipe.makefile("rb")
        if not (line := self._stream.readline()).endswith(b"\n"):
            sys.exit()  # the parent ended meanwhile
        self.start: T = msgspec.json.decode(line, type=start_type)
        ignore_terminal_signals()
        die_with_parent()
        if watches:
            threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def _watch(self) -> None:
        while self._stream.read(1):
            pass
        os._exit(0)

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of a phase are done."""
        self._say(ChildProgress(phase, done, total))

    def fault(self, message: str, exit_code: int) -> None:
        """Report the error that ends this process."""
        self._say(ChildFault(message, exit_code))

    def _say(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(OSError):
            self._pipe.sendall(msgspec.json.encode(message) + b"\n")


def run_child(run: Callable[[Parent[T]], None], start_type: type[T]) -> int:
    """Run a child whose control pipe `sys.argv` names; return its exit code. Report the error that ends it."""
    parent = Parent(int(sys.argv[1]), start_type)
    try:
        run(parent)
    except PyptoError as error:
        parent.fault(str(error), error.exit_code)
        return error.exit_code
    return EXIT_OK


@contextlib.contextmanager
def terminal_signals_held() -> Iterator[None]:
    """Let terminal signals wait, in this thread and in processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINAL_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_terminal_signals() -> None:
    """Ignore terminal signals, and forget those that wait. A process group in the background may write, too."""
    for number in (*TERMINAL_SIGNALS, signal.SIGTTOU):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINAL_SIGNALS)


def die_with_parent() -> None:
    """On Linux, let the kernel kill this process, even if stopped or stuck, when its parent's thread ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
