"""Run a reader process and watch over it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

import msgspec

from pypto_serving.api.reading.wire import HEAD, SIZE_BYTES, Busy, Ended, Failure, Fault, Refusal, RefusedError
from pypto_serving.errors import RequestError, RequestFailedError, UnavailableError
from pypto_serving.processes import Child, start_module

logger = logging.getLogger("pypto_serving.api")

START_S = 60.0
DYING_S = 5.0
PATIENCE, PATIENCE_S = 6, 10.0
"""The real time may be this multiple of the CPU time, and so much more: other processes use the CPUs too."""
PIECE_BYTES = 1 << 18
"""Bytes written to a reader before others have their turn."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Readers make copies of themselves, so numpy must start no threads there."""
T = TypeVar("T")


class TooSlowError(RequestError):
    """Reading a task took all the CPU time that it may take."""

    code = "reading_timeout"

    def __init__(self) -> None:
        super().__init__("reading this took too long")


class TooLargeError(RequestError):
    """Reading a task took too much memory. Native code that gets none aborts."""

    code = "request_too_large"

    def __init__(self) -> None:
        super().__init__("this request takes too much memory to read; send less")


class ReaderProcess(Generic[T]):
    """Owns one reader process, which does one task at a time. Starts it when needed; ends it when it is too slow."""

    def __init__(
        self, module: str, start: Callable[[int], msgspec.Struct], answers: msgspec.msgpack.Decoder[T | Failure]
    ) -> None:
        """`start` makes what `module` needs to start, for the file descriptor of its channel."""
        self._module = module
        self._start_of = start
        self._answers = answers
        self._child: Child | None = None
        self._closed = False
        self._input: asyncio.StreamReader
        self._output: asyncio.StreamWriter | None = None

    async def ask(self, kind: int, raw: bytes | bytearray, allowed_s: float) -> T:
        """Return the answer to one task, which may take `allowed_s` of CPU time. One call at a time, never cancelled.

        Raises RefusedError if that is the answer, TooSlowError, TooLargeError, RequestFailedError if the process ended
        in another way twice, UnavailableError if there is none or the machine is too busy, RuntimeError if the reader
        failed.
        """
        with suppress(RequestFailedError):
            return await self._ask(kind, raw, allowed_s)
        return await self._ask(kind, raw, allowed_s)

    async def _ask(self, kind: int, raw: bytes | bytearray, allowed_s: float) -> T:
        output = await self.ensure()
        real_s = PATIENCE_S + PATIENCE * allowed_s
        try:
            async with asyncio.timeout(real_s):
                output.write(HEAD.pack(kind, len(raw), allowed_s))
                for at in range(0, len(raw), PIECE_BYTES):
                    output.write(raw[at : at + PIECE_BYTES])
                    await output.drain()
                answer = self._answers.decode(await self._receive())
        except TimeoutError:
            await self._end()
            logger.error("reading a request took more than %.0f s, less than %g s of it CPU time", real_s, allowed_s)
            raise UnavailableError(
                f"the server is too busy to read this request: in {real_s:.0f} s it got less than {allowed_s:g} s of "
                "CPU time; try again later"
            ) from None
        except (OSError, EOFError):
            if self._closed:
                raise UnavailableError("the server is shutting down") from None
            raise _error_of(await self._end(DYING_S)) from None
        if isinstance(answer, Refusal):
            raise RefusedError(answer)
        if isinstance(answer, Fault):
            raise RuntimeError(f"a reader failed:\n{answer.traceback}")
        if isinstance(answer, Ended):
            raise _error_of(answer.code)
        if isinstance(answer, Busy):
            logger.error("a reader could not start its copy: %s", answer.reason)
            raise UnavailableError("the machine is too busy to read this request; try again later")
        return answer

    async def ensure(self) -> asyncio.StreamWriter:
        """Start the process if there is none; return where tasks are written. Raises UnavailableError."""
        if self._output is not None and self._child is not None and self._child.process.poll() is None:
            return self._output
        await self._end()
        if self._closed:
            raise UnavailableError("the server is shutting down")
        try:
            async with asyncio.timeout(START_S):
                return await self._start()
        except (TimeoutError, OSError, EOFError):
            if self._closed:
                raise UnavailableError("the server is shutting down") from None
            logger.error("a reader did not start: it ended with code %d", await self._end())
            raise UnavailableError("the process that reads requests did not start; try again later") from None

    async def close(self) -> None:
        """End the process, whatever it does, for good."""
        self._closed = True
        await self._end()

    async def _end(self, patience_s: float = 0.0) -> int:
        """End the process; return its exit code. The next task starts another."""
        output, self._output = self._output, None
        if output is not None:
            output.close()
        child, self._child = self._child, None
        if child is None:
            return 0
        asyncio.get_running_loop().remove_reader(child.pipe)
        return await asyncio.to_thread(child.end, patience_s)

    async def _receive(self) -> bytes:
        size = int.from_bytes(await self._input.readexactly(SIZE_BYTES), "little")
        return await self._input.readexactly(size)

    async def _start(self) -> asyncio.StreamWriter:
        ours, theirs = socket.socketpair()
        self._child = start_module(self._module, self._start_of(theirs.fileno()), theirs, variables=ONE_THREAD)
        self._reap(self._child)
        self._input, output = await asyncio.open_unix_connection(sock=ours)
        try:
            await self._receive()
        except BaseException:
            output.close()
            raise
        self._output = output
        return output

    def _reap(self, child: Child) -> None:
        """Have a process that ends waited for, also where no task finds out, so that it is no zombie."""
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(child.pipe)
            loop.run_in_executor(None, child.process.wait)

        loop.add_reader(child.pipe, gone)


def _error_of(code: int) -> RequestError:
    """Explain the end of a process."""
    if code == -signal.SIGPROF:
        return TooSlowError()
    logger.error("a reader ended with code %d", code)
    if code == -signal.SIGABRT:
        return TooLargeError()
    return RequestFailedError(
        "the process that read this request ended unexpectedly; the log of the server may say why"
    )
