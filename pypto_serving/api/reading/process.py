"""The reader as seen from the API process: its queue, its jobs, and how it starts and ends."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

import msgspec

from pypto_serving.api.common.body import Answered, ReadBody
from pypto_serving.api.reading.wire import (
    END,
    HEAD,
    JOB,
    KINDS,
    NO_COPY,
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
from pypto_serving.limits import cpu_limit_s
from pypto_serving.processes import Child, start_module
from pypto_serving.types.config import EngineConfig

logger = logging.getLogger("pypto_serving.api")

MAX_COPIES = 2
"""Jobs that the reader does at once."""
IDLE_S = 300.0
"""How long the reader stays without a job."""
PATIENCE, PATIENCE_S = 6, 10.0
"""The real time of a job may be this multiple of its CPU time, and so much more: other processes use the CPUs too."""
RETRY_S = 5
PIECE_BYTES = 1 << 18
"""Bytes written to the reader before others have their turn."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""The reader makes copies of itself, so numpy must start no threads there."""
Answer = ReadBody | Answered | Compiles
ANSWERS: msgspec.msgpack.Decoder[Answer | Refusal | ReaderFault] = msgspec.msgpack.Decoder(
    Answer | Refusal | ReaderFault
)


class TooSlowError(RequestError):
    """A job took all the CPU time that it may take."""

    code = "reading_timeout"


class TooLargeError(RequestError):
    """A job took too much memory. Native code that gets none aborts."""

    code = "request_too_large"


class ReaderQueue:
    """Owns the jobs that wait for the reader. The host whose jobs used the least CPU time is next: see FairQueue.

    If more than `max_waiting` wait, the newest of the host with the most is refused.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._jobs: FairQueue[str, asyncio.Future[None]] = FairQueue()
        self.num_running = 0

    def __len__(self) -> int:
        return len(self._jobs)

    async def take_turn(self, host: str) -> None:
        """Wait for a turn; call `end_turn` after it. Raises QueueFullError. A call that is cancelled has no turn."""
        if self.num_running < MAX_COPIES:
            self.num_running += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._jobs.push(host, turn)
        if len(self._jobs) > self._max_waiting:
            message = f"{self._max_waiting} requests wait to be read; try again later"
            self._jobs.pop_longest().set_exception(QueueFullError(message, RETRY_S))
        try:
            await turn
        except asyncio.CancelledError:
            if not self._jobs.remove(host, turn) and not turn.cancelled() and turn.exception() is None:
                self.end_turn(host, 0.0)
            raise

    def end_turn(self, host: str, used_s: float) -> None:
        """End a turn that took so much CPU time; the next one begins."""
        self._jobs.charge(host, used_s)
        while (turn := self._jobs.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                return
        self.num_running -= 1


class Reader:
    """Owns the reader process and its queue. It starts with the first job and ends when it is idle for long."""

    def __init__(self, config: EngineConfig, serving: ServingConfig) -> None:
        serving = msgspec.structs.replace(serving, api_keys=())
        self._start_of: Callable[[int], ReaderStart] = lambda control: ReaderStart(config, serving, control)
        self.queue = ReaderQueue(config.max_unfinished)
        self.child: Child | None = None
        self._closed = False
        self._control: socket.socket | None = None
        self._numbers = itertools.count()
        self._ends: dict[int, asyncio.Future[tuple[int, float]]] = {}
        self._idle: asyncio.TimerHandle | None = None
        self._burying: asyncio.Future[None] | None = None

    async def ask(self, kind: JobKind, raw: bytes | bytearray, host: str = "") -> Answer:
        """Return the answer to a job at its host's turn.

        Raises RefusedError if that is the answer, QueueFullError, TooSlowError, TooLargeError, RequestFailedError if
        its copy ended in another way twice, UnavailableError if there is no reader or the machine is too busy,
        RuntimeError if the job failed.

        A call that is cancelled before its turn costs nothing; a job that has begun goes on to its end.
        """
        await self.queue.take_turn(host)
        working = asyncio.ensure_future(self._work(kind, raw, host))
        working.add_done_callback(lambda done: None if done.cancelled() else done.exception())  # the caller may be gone
        return await asyncio.shield(working)

    async def _work(self, kind: JobKind, raw: bytes | bytearray, host: str) -> Answer:
        used_s = 0.0
        try:
            for tries_left in (1, 0):
                said, code, took_s = await self._run(kind, raw)
                used_s += took_s
                if not code:
                    return _read_answer(said)
                error = _error_of(code)
                if not tries_left or not isinstance(error, RequestFailedError):
                    raise error
            raise AssertionError("the second try returns or raises")
        finally:
            self.queue.end_turn(host, used_s)

    async def _run(self, kind: JobKind, raw: bytes | bytearray) -> tuple[bytes, int, float]:
        """Have a copy of the reader do a job; return what it wrote, its exit code and its CPU time."""
        allowed_s = cpu_limit_s(len(raw))
        real_s = PATIENCE_S + PATIENCE * allowed_s
        number, ended = next(self._numbers), asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(real_s):
                control = self._ensure()
                self._ends[number] = ended
                said = await _exchange(control, JOB.pack(number, KINDS.index(kind)), raw, allowed_s)
                code, used_s = await ended
        except TimeoutError:
            await self._end()
            logger.error("reading a request took more than %.0f s, less than %g s of it CPU time", real_s, allowed_s)
            raise UnavailableError(
                f"the server is too busy to read this request: in {real_s:.0f} s it got less than {allowed_s:g} s of "
                "CPU time; try again later"
            ) from None
        finally:
            self._ends.pop(number, None)
            if not self._ends and not self._closed:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)
        return said, code, used_s

    def _ensure(self) -> socket.socket:
        """Start the process if there is none; return where jobs go. Raises UnavailableError."""
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
            raise UnavailableError("the process that reads requests did not start; try again later") from None
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._take_ends)
        return ours

    def _take_ends(self) -> None:
        """Take in how jobs ended; if the process itself did, so did all of them."""
        assert self._control is not None
        with suppress(BlockingIOError):
            while end := _receive(self._control):
                number, code, used_s = END.unpack(end)
                if (waiting := self._ends.get(number)) is not None and not waiting.done():
                    waiting.set_result((code, used_s))
            child = self._detach()
            if child is not None:
                self._burying = asyncio.ensure_future(self._bury(child))

    def _detach(self) -> Child | None:
        """Forget the process, which is to end or has ended."""
        child, self.child = self.child, None
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None
        return child

    async def _bury(self, child: Child, patience_s: float = 5.0) -> None:
        """Wait for the end of the process, and end the jobs that it had."""
        jobs = list(self._ends.values())
        code = await asyncio.to_thread(child.end, patience_s)
        if not self._closed:
            logger.error("the reader ended with code %d", code)
        for waiting in jobs:
            if not waiting.done() and self._closed:
                waiting.set_exception(UnavailableError("the server is shutting down"))
            elif not waiting.done():
                waiting.set_result((code or 1, 0.0))

    def _end_idle(self) -> None:
        if not self._ends and (child := self._detach()) is not None:
            asyncio.get_running_loop().run_in_executor(None, child.end, 0.0)

    async def _end(self) -> None:
        """End the process, whatever it does, and all its jobs. The next one starts another."""
        if (child := self._detach()) is not None:
            await self._bury(child, 0.0)

    async def close(self) -> None:
        """End the process for good."""
        self._closed = True
        if self._idle is not None:
            self._idle.cancel()
        await self._end()


def _receive(control: socket.socket) -> bytes:
    try:
        return control.recv(END.size)
    except ConnectionResetError:
        return b""


async def _exchange(control: socket.socket, job: bytes, raw: bytes | bytearray, allowed_s: float) -> bytes:
    """Send a job over a socket of its own; return what its copy wrote until it ended."""
    ours, theirs = socket.socketpair()
    with theirs, suppress(OSError):  # the reader is gone: the job ends with it
        socket.send_fds(control, [job], [theirs.fileno()])
    reading, writing = await asyncio.open_unix_connection(sock=ours)
    try:
        with suppress(OSError):  # its copy is gone
            writing.write(HEAD.pack(len(raw), allowed_s))
            for at in range(0, len(raw), PIECE_BYTES):
                writing.write(raw[at : at + PIECE_BYTES])
                await writing.drain()
            return await reading.read()
        return b""
    finally:
        writing.close()


def _read_answer(said: bytes) -> Answer:
    answer = ANSWERS.decode(said)
    if isinstance(answer, Refusal):
        raise RefusedError(answer)
    if isinstance(answer, ReaderFault):
        raise RuntimeError(f"the reader failed:\n{answer.traceback}")
    return answer


def _error_of(code: int) -> RequestError:
    """Explain the end of a copy."""
    if code == NO_COPY:
        logger.error("the reader could not start a copy: there are too many processes or files")
        return UnavailableError("the machine is too busy to read this request; try again later")
    if code == -signal.SIGPROF:
        return TooSlowError("reading this took too long")
    logger.error("a job of the reader ended with code %d", code)
    if code == -signal.SIGABRT:
        return TooLargeError("this request takes too much memory to read; send less")
    return RequestFailedError(
        "the process that read this request ended unexpectedly; the log of the server may say why"
    )
