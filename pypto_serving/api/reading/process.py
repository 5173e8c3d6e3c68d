"""Run a reader process and watch over it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket

import msgspec

from pypto_serving.api.openai.body import Endpoint, ReadBody
from pypto_serving.api.reading.turns import Turns
from pypto_serving.api.reading.wire import (
    ANSWERS,
    ENDPOINTS,
    HEAD,
    SIZE_BYTES,
    Fault,
    ReaderStart,
    RefusedError,
)
from pypto_serving.api.settings import ServingConfig
from pypto_serving.errors import RequestError, RequestFailedError, UnavailableError
from pypto_serving.ipc import Child
from pypto_serving.types.config import EngineConfig

logger = logging.getLogger("pypto_serving.api")

START_S = 60.0
DYING_S = 5.0
READ_S = 10.0
"""CPU time to read a body; each MiB of it may take one second more."""
PATIENCE = 6
"""The real time may be this multiple of the CPU time: other processes use the CPUs too."""
MIB = 1 << 20
PIECE_BYTES = 1 << 18
"""Bytes written to a reader before others have their turn."""


class ReaderProcess:
    """Owns one reader process, which reads one body at a time. Starts it when needed; ends it when it is too slow."""

    def __init__(self, config: EngineConfig, serving: ServingConfig) -> None:
        self._config = config
        self._serving = msgspec.structs.replace(serving, api_key=None)
        self._turns = Turns(config.max_unfinished)
        self._child: Child | None = None
        self._closed = False
        self._input: asyncio.StreamReader
        self._output: asyncio.StreamWriter | None = None

    async def read(self, endpoint: Endpoint, raw: bytes | bytearray) -> ReadBody:
        """Read one body; see Turns for which is next. Raises RequestError, and RuntimeError if the reader fails on it.

        A call that is cancelled before its turn costs nothing; a body that is being read is read to the end.
        """
        await self._turns.take(len(raw))
        reading = asyncio.ensure_future(self._read(endpoint, raw))
        reading.add_done_callback(self._end_turn)
        return await asyncio.shield(reading)

    def _end_turn(self, reading: asyncio.Future[ReadBody]) -> None:
        self._turns.end()
        if not reading.cancelled():
            reading.exception()  # the caller may be gone

    async def start(self) -> None:
        """Start the process if there is none, and wait until it can read. Raises UnavailableError."""
        await self._turns.take(0)
        try:
            await self._ensure()
        finally:
            self._turns.end()

    async def close(self) -> None:
        """End the process, whatever it does, for good."""
        self._closed = True
        await self._end()

    async def _end(self, patience_s: float = 0.0) -> int:
        """End the process; return its exit code. The next body starts another."""
        output, self._output = self._output, None
        if output is not None:
            output.close()
        child, self._child = self._child, None
        return 0 if child is None else await asyncio.to_thread(child.end, patience_s)

    async def _read(self, endpoint: Endpoint, raw: bytes | bytearray) -> ReadBody:
        output = await self._ensure()
        allowed_s = READ_S + len(raw) / MIB
        try:
            async with asyncio.timeout(PATIENCE * allowed_s):
                output.write(HEAD.pack(ENDPOINTS.index(endpoint), len(raw), allowed_s))
                for at in range(0, len(raw), PIECE_BYTES):
                    output.write(raw[at : at + PIECE_BYTES])
                    await output.drain()
                answer = ANSWERS.decode(await self._receive())
        except TimeoutError:
            await self._end()
            raise _too_slow(endpoint, allowed_s) from None
        except (OSError, EOFError):
            if self._closed:
                raise UnavailableError("the server is shutting down") from None
            code = await self._end(DYING_S)
            raise _too_slow(endpoint, allowed_s) if code == -signal.SIGPROF else _ended(code) from None
        if isinstance(answer, ReadBody):
            return answer
        if isinstance(answer, Fault):
            raise RuntimeError(f"a reader failed on a body:\n{answer.traceback}")
        raise RefusedError(answer)

    async def _receive(self) -> bytes:
        size = int.from_bytes(await self._input.readexactly(SIZE_BYTES), "little")
        return await self._input.readexactly(size)

    async def _ensure(self) -> asyncio.StreamWriter:
        """Return where bodies are written, to a process that is ready for them."""
        if self._closed:
            raise UnavailableError("the server is shutting down")
        if self._output is not None and self._child is not None and self._child.process.poll() is None:
            return self._output
        await self._end()
        try:
            async with asyncio.timeout(START_S):
                return await self._start()
        except (TimeoutError, OSError, EOFError):
            if self._closed:
                raise UnavailableError("the server is shutting down") from None
            logger.error("a reader of bodies did not start: it ended with code %d", await self._end())
            raise UnavailableError("the process that reads requests did not start; try again later") from None

    async def _start(self) -> asyncio.StreamWriter:
        ours, theirs = socket.socketpair()
        start = ReaderStart(self._config, self._serving, theirs.fileno())
        self._child = Child("pypto_serving.api.reading", start, theirs)
        self._input, output = await asyncio.open_unix_connection(sock=ours)
        try:
            await self._receive()
        except BaseException:
            output.close()
            raise
        self._output = output
        return output


def _ended(code: int) -> RequestError:
    """Explain the end of a process; native code that gets no memory aborts."""
    logger.error("a reader of bodies ended with code %d", code)
    if code == -signal.SIGABRT:
        return RequestError("this request takes too much memory to read; send less", code="request_too_large")
    message = "the process that read this request ended unexpectedly; the log of the server may say why"
    return RequestFailedError(message)


def _too_slow(endpoint: Endpoint, allowed_s: float) -> RequestError:
    advice = "send less text, fewer prompts, or a simpler schema or grammar"
    if endpoint == "chat":
        advice = (
            "send fewer or shorter messages, or a simpler schema or grammar; if short chats fail too, the model's chat "
            "template does not end"
        )
    message = (
        f"reading this request took more than {allowed_s:.0f} s of CPU time, or its schema or grammar took too long to "
        f"compile, so it was given up; {advice}"
    )
    logger.error("a body of %s was given up after %.0f s of CPU time", endpoint, allowed_s)
    return RequestError(message, param="messages" if endpoint == "chat" else "prompt", code="reading_timeout")
