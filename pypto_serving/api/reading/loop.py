"""The loop of a reader: answer one task after the other, each within its time.

A reader, or its copy for the task, is expendable: a task that makes it slow or large ends it, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from io import BufferedRWPair
from pathlib import Path

import msgspec

from pypto_serving.api.reading.wire import HEAD, SIZE_BYTES, Busy, Ended, Fault, Refusal
from pypto_serving.processes import Copy
from pypto_serving.util import GIB, format_size

MAX_BYTES = 2 * GIB
"""Memory that a reader may take for data."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Short of memory, the kernel ends the process with the highest score first: a reader, and not the worker."""
ENDED_BY_TASK = (-signal.SIGPROF, -signal.SIGABRT)
"""What ends a reader whose task takes too long, and, in native code, too much memory."""

Answer = Callable[[int, bytes], msgspec.Struct]
"""Reads a task of a kind."""
Read = Callable[[int, bytes, float], bytes]
"""Reads a task of a kind within so much CPU time; returns the encoded answer."""


def limit_memory() -> None:
    """Bound the memory of this process, which is the first to end where memory is short."""
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        OOM_SCORE.write_text("1000")


def run(fd: int, read: Read) -> None:
    """Answer tasks until the other side closes the channel."""
    channel = open_channel(fd)
    answer_all(channel, read)


def run_copies(fd: int, answer: Answer) -> None:
    """Have a copy of this process answer tasks, and another one whenever a task ended it.

    So the next task waits for no start of a process. There must be no threads. Ends when the channel closes, or when
    something else ended a copy, which may then not have read all of its task.
    """
    channel = open_channel(fd)
    while (code := Copy(partial(answer_all, channel, partial(here, answer))).wait()) in ENDED_BY_TASK:
        send(channel, msgspec.msgpack.encode(Ended(code)))
    if code:
        sys.exit(f"the copy of a reader ended with code {code}")


def open_channel(fd: int) -> BufferedRWPair:
    """Say that this process can read now. Ends it if the other side is gone already."""
    end = socket.socket(fileno=fd)
    try:
        end.sendall(bytes(SIZE_BYTES))
    except BrokenPipeError:
        sys.exit()
    return end.makefile("rwb")


def answer_all(channel: BufferedRWPair, read: Read) -> None:
    while head := channel.read(HEAD.size):
        kind, size, allowed_s = HEAD.unpack(head)
        send(channel, read(kind, channel.read(size), allowed_s))


def here(answer: Answer, kind: int, raw: bytes, allowed_s: float) -> bytes:
    """Answer a task. SIGPROF ends this process if it takes too long."""
    signal.setitimer(signal.ITIMER_PROF, allowed_s)
    said = msgspec.msgpack.encode(guarded(answer, kind, raw))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return said


def apart(answer: Answer, kind: int, raw: bytes, allowed_s: float) -> bytes:
    """Answer a task in a copy of this process, which ends alone if it takes too long. There must be no threads."""

    def say() -> None:
        pipe.write(here(answer, kind, raw, allowed_s))
        pipe.flush()

    try:
        reading, writing = os.pipe()
        with os.fdopen(reading, "rb") as answers:
            with os.fdopen(writing, "wb") as pipe:
                copy = Copy(say)
            said = answers.read()
    except OSError as error:
        return msgspec.msgpack.encode(Busy(str(error)))
    return msgspec.msgpack.encode(Ended(code)) if (code := copy.wait()) else said


def guarded(answer: Answer, kind: int, raw: bytes) -> msgspec.Struct:
    """Return the answer, or what became of it instead."""
    try:
        return answer(kind, raw)
    except MemoryError:
        return Refusal(
            400,
            f"this takes more than {format_size(MAX_BYTES)} of memory to read; send less",
            "request_too_large",
            None,
        )
    except BaseException:  # a panic of Rust is no Exception
        return Fault(traceback.format_exc())


def send(channel: BufferedRWPair, data: bytes) -> None:
    channel.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
    channel.flush()
