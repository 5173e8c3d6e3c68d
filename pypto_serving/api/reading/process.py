"""The API process's side of the reader: its queues and copies, its start and its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from pypto_serving.api.common.body import Answered, ReadBody
from pypto_serving.api.reading.wire import (
    ANSWER,
    JOB,
    KINDS,
    READY,
    Compiles,
    JobKind,
    ReaderFault,
    ReaderStart,
    Refusal,
    RefusedError,
)
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import QueueFullError, RequestError, RequestFailedError, UnavailableError
from pypto_serving.fair_queue import FairQueue
from pypto_serving.limits import IDLE_S, STUCK_S, cpu_limit_s
from pypto_serving.processes import COPY_END, COPY_NUMBER, NO_COPY, NOT_PREPARED, Child, start_module
from pypto_serving.threads import in_quick_thread
from pypto_serving.types.config import EngineConfig

logger = logging.getLogger("pypto_serving.api")

PATIENCE = 10
"""A job may take this multiple of its CPU time in real time, since other processes use the CPUs too."""
RETRY_S = 5
NOT_STARTED = "the process that reads requests did not start; try again later"
PIECE_BYTES = 1 << 18
"""Bytes written to the reader before other tasks of the event loop run."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment that keeps numpy from starting threads in the reader, which forks."""
QueueName = Literal["grammars", "bodies", "large bodies"]
T = TypeVar("T")
Answer = ReadBody | Answered | Compiles
ANSWERS: msgspec.msgpack.Decoder[Answer | Refusal | ReaderFault] = msgspec.msgpack.Decoder(
    Answer | Refusal | ReaderFault
)


class TooSlowError(RequestError):
    """A job exceeded its CPU time."""

    code = "reading_timeout"


class TooLargeError(RequestError):
    """A job took too much memory, so native code in it may have aborted."""

    code = "request_too_large"


class ReaderCopy(NamedTuple):
    """A copy of the reader: its number, and its socket."""

    number: int
    reading: asyncio.StreamReader
    writing: asyncio.StreamWriter


class ReaderQueue:
    """Owns a copy of the reader, and the jobs that wait for it. The host that used the least CPU time is next.

    If more than `max_waiting` jobs wait, refuse the newest job of the host with the most jobs. See FairQueue.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._jobs: FairQueue[str, asyncio.Future[None]] = FairQueue()
        self.is_running = False
        self.copy: ReaderCopy | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    async def take_turn(self, host: str) -> None:
        """Wait for a turn, which `end_turn` must end. Raises QueueFullError. A cancelled call gets no turn."""
        if not self.is_running:
            self.is_running = True
            return
        turn = asyncio.get_running_loop().create_future()
        self._jobs.push(host, turn)
        if len(self._jobs) > self._max_waiting:
            message = f"{self._max_waiting} requests wait to be read; try again later"
            refused = self._jobs.pop_longest()
            if not refused.done():
                refused.set_exception(QueueFullError(message, RETRY_S))
        try:
            await turn
        except asyncio.CancelledError:
            if not self._jobs.remove(host, turn) and not turn.cancelled() and turn.exception() is None:
                self.end_turn()
            raise

    def charge(self, host: str, used_s: float) -> None:
        """Add the CPU time of a host's job to the host's account."""
        self._jobs.charge(host, used_s)

    def end_turn(self) -> None:
        """End a turn, and begin the next one."""
        while (turn := self._jobs.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self.is_running = False


class Reader:
    """Owns the reader process and its queues. The process starts with the first job and ends when idle for long.

    Grammars, usual bodies and large bodies have a copy each, so that they do not wait for each other.
    """

    def __init__(self, config: EngineConfig, serving: ServingConfig) -> None:
        serving = msgspec.structs.replace(serving, api_keys=())
        self._start_of: Callable[[int], ReaderStart] = lambda control: ReaderStart(config, serving, control)
        self.queues = {name: ReaderQueue(config.max_unfinished) for name in get_args(QueueName)}
        self.child: Child | None = None
        self._closed = False
        self._control: socket.socket | None = None
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[tuple[int, float]]] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._burying: asyncio.Future[Any] | None = None

    @property
    def is_running(self) -> bool:
        """Return whether a job is running."""
        return any(queue.is_running for queue in self.queues.values())

    async def at_turn(self, name: QueueName, host: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Call `work` when it is its host's turn in a queue; return the result. Raises QueueFullError.

        A call that is cancelled before its turn costs nothing; work that has begun runs to its end.
        """
        queue = self.queues[name]
        await queue.take_turn(host)
        working = asyncio.ensure_future(work())

        def end(done: asyncio.Future[T]) -> None:
            queue.end_turn()
            if not done.cancelled():
                done.exception()  # mark it as retrieved, since the caller may be gone
            if self._idle is not None:
                self._idle.cancel()
            if not self.is_running and not self._closed:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)

        working.add_done_callback(end)
        return await asyncio.shield(working)

    async def do(self, name: QueueName, host: str, kind: JobKind, raw: bytes | bytearray) -> Answer:
        """Do a job in the copy of a queue, during a turn in that queue; return the answer.

        Raises RefusedError if the answer is a refusal, TooSlowError, TooLargeError, RequestFailedError if the copy
        ended otherwise twice, UnavailableError if there is no reader or the machine is too busy, RuntimeError if the
        job failed.
        """
        queue = self.queues[name]
        for tries_left in (1, 0):
            said, code, used_s = await self._run(queue, kind, raw)
            queue.charge(host, used_s)
            if not code:
                return _read_answer(said)
            error = _error_of(code)
            if not tries_left or not isinstance(error, RequestFailedError):
                raise error
        raise AssertionError("the second try returns or raises")

    async def _run(self, queue: ReaderQueue, kind: JobKind, raw: bytes | bytearray) -> tuple[bytes, int, float]:
        """Do a job in the copy of a queue; return the answer, the copy's exit code if it ended, and the CPU time."""
        allowed_s = cpu_limit_s(len(raw))
        real_s = PATIENCE * allowed_s
        copy = queue.copy or await self._start_copy(kind)
        if isinstance(copy, int):
            return b"", copy, 0.0
        queue.copy = None
        try:
            async with asyncio.timeout(real_s):
                if (answered := await _exchange(copy, kind, raw, allowed_s)) is not None:
                    said, used_s, is_last = answered
                    if is_last:
                        self._ends.pop(copy.number, None)
                        copy.writing.close()
                    else:
                        queue.copy = copy
                    return said, 0, used_s
                copy.writing.close()
                return b"", *await self._end_of(copy.number)
        except TimeoutError:
            await self._end()
            self._ends.pop(copy.number, None)
            logger.error("reading a request took more than %.0f s, less than %g s of it CPU time", real_s, allowed_s)
            raise UnavailableError(
                f"the server is too busy to read this request: in {real_s:.0f} s it got less than {allowed_s:g} s of "
                "CPU time; try again later"
            ) from None

    async def _start_copy(self, kind: JobKind) -> ReaderCopy | int:
        """Start a copy; return it, or its exit code if it ended. Raises UnavailableError."""
        control, number = self._ensure(), next(self._numbers)
        self._ends[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(STUCK_S):
                ours, theirs = socket.socketpair()
                with theirs, suppress(OSError):  # the reader is gone: the copy ends with it
                    socket.send_fds(control, [COPY_NUMBER.pack(number), bytes([KINDS.index(kind)])], [theirs.fileno()])
                reading, writing = await asyncio.open_unix_connection(sock=ours)
                with suppress(OSError):
                    if await reading.read(1) == READY:
                        return ReaderCopy(number, reading, writing)
                writing.close()
                return (await self._end_of(number))[0]
        except TimeoutError:
            await self._end()
            self._ends.pop(number, None)
            raise UnavailableError(NOT_STARTED) from None

    async def _end_of(self, number: int) -> tuple[int, float]:
        """Return the exit code of a copy, and the CPU time that it took."""
        try:
            return await self._ends[number]
        finally:
            self._ends.pop(number, None)

    def _ensure(self) -> socket.socket:
        """Start the process if there is none; return the control socket. Raises UnavailableError."""
        if self._closed:
            raise UnavailableError("the server is shutting down")
        if self._idle is not None:
            self._idle.cancel()
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        try:
            self.child = start_module(
                "pypto_serving.api.reading", self._start_of(theirs.fileno()), theirs, variables=ONE_THREAD
            )
        except OSError as error:
            ours.close()
            logger.error("the reader did not start: %s", error)
            raise UnavailableError(NOT_STARTED) from None
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._take_ends)
        return ours

    def _take_ends(self) -> None:
        """Read the exit codes of ended copies; if the process itself has ended, so have all copies."""
        assert self._control is not None
        with suppress(BlockingIOError):
            while end := _receive(self._control):
                number, code, used_s = COPY_END.unpack(end)
                self._take_end(number, code, used_s)
            if (child := self._detach()) is not None:
                self._burying = asyncio.ensure_future(self._bury(child, self._take_jobs()))

    def _take_end(self, number: int, code: int, used_s: float) -> None:
        """Pass the end of a copy to its job, if it has one; forget the copy."""
        for queue in self.queues.values():
            if queue.copy is not None and queue.copy.number == number:
                queue.copy.writing.close()
                queue.copy = None
                self._ends.pop(number).cancel()
                return
        if (waiting := self._ends.get(number)) is not None and not waiting.done():
            waiting.set_result((code, used_s))

    def _take_jobs(self) -> list[asyncio.Future[tuple[int, float]]]:
        """Forget all copies; return the futures that wait for the ends of copies with a job."""
        for queue in self.queues.values():
            if queue.copy is not None:
                self._take_end(queue.copy.number, 0, 0.0)
        return list(self._ends.values())

    def _detach(self) -> Child | None:
        """Forget the process, which has ended or will be ended, and return it."""
        if self._idle is not None:
            self._idle.cancel()
        child, self.child = self.child, None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        return child

    async def _bury(self, child: Child, jobs: list[asyncio.Future[tuple[int, float]]], patience_s: float = 5.0) -> None:
        """Wait for the end of the process, and end the jobs that it had."""
        code = await in_quick_thread(child.end, patience_s)
        if not self._closed:
            logger.error("the reader ended with code %d", code)
        for waiting in jobs:
            if not waiting.done() and self._closed:
                waiting.set_exception(UnavailableError("the server is shutting down"))
            elif not waiting.done():
                waiting.set_result((code or 1, 0.0))

    def _end_idle(self) -> None:
        if not self.is_running and (child := self._detach()) is not None:
            self._take_jobs()
            self._burying = asyncio.ensure_future(in_quick_thread(child.end, 0.0))

    async def _end(self) -> None:
        """End the process and all its jobs. The next job starts another process."""
        if (child := self._detach()) is not None:
            await self._bury(child, self._take_jobs(), 0.0)

    async def close(self) -> None:
        """End the process for good."""
        self._closed = True
        await self._end()


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(COPY_END.size)
    except ConnectionResetError:
        return b""


async def _exchange(
    copy: ReaderCopy, kind: JobKind, raw: bytes | bytearray, allowed_s: float
) -> tuple[bytes, float, bool] | None:
    """Send a job to a copy; return the answer, the CPU time and whether the copy ends now; None if it died."""
    try:
        copy.writing.write(JOB.pack(KINDS.index(kind), len(raw), allowed_s))
        for at in range(0, len(raw), PIECE_BYTES):
            copy.writing.write(raw[at : at + PIECE_BYTES])
            await copy.writing.drain()
        size, used_s, is_last = ANSWER.unpack(await copy.reading.readexactly(ANSWER.size))
        return await copy.reading.readexactly(size), used_s, is_last
    except (OSError, asyncio.IncompleteReadError):
        return None


def _read_answer(said: bytes) -> Answer:
    answer = ANSWERS.decode(said)
    if isinstance(answer, Refusal):
        raise RefusedError(answer)
    if isinstance(answer, ReaderFault):
        raise RuntimeError(f"the reader failed:\n{answer.traceback}")
    return answer


def _error_of(code: int) -> RequestError:
    """Return the error for a copy's exit code."""
    if code == NO_COPY:
        logger.error("the reader could not start a copy: there are too many processes or files")
        return UnavailableError("the machine is too busy to read this request; try again later")
    if code == NOT_PREPARED:
        return UnavailableError(NOT_STARTED)
    if code == -signal.SIGPROF:
        return TooSlowError("reading this took too long")
    logger.error("a job of the reader ended with code %d", code)
    if code in (-signal.SIGABRT, -signal.SIGSEGV):  # SIGSEGV: nesting overflowed the stack
        return TooLargeError("this request takes too much memory to read; send less")
    return RequestFailedError(
        "the process that read this request ended unexpectedly; the log of the server may say why"
    )
