"""The loop of a reader: answer one task after the other, each within its time.

A reader, or its copy for the task, is expendable: a task that makes it slow or large ends it, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import traceback
from collections.abc import Callable
from io import BufferedRWPair
from pathlib import Path

import msgspec

from pypto_serving.api.reading.wire import HEAD, SIZE_BYTES, Ended, Fault, Refusal
from pypto_serving.ipc import die_with_parent
from pypto_serving.util import GIB, format_size

MAX_BYTES = 2 * GIB
"""Memory that a reader may take for data."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Short of memory, the kernel ends the process with the highest score first: a reader, and not the worker."""

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
    channel = socket.socket(fileno=fd).makefile("rwb")
    send(channel, b"")
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
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            die_with_parent()
            os.close(reading)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(here(answer, kind, raw, allowed_s))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return msgspec.msgpack.encode(Ended(code)) if code else said


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
    except Exception:
        return Fault(traceback.format_exc())


def send(channel: BufferedRWPair, data: bytes) -> None:
    channel.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
    channel.flush()
