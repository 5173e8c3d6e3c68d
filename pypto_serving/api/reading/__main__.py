"""Run a reader: `python -m pypto_serving.api.reading FD`. FD is its end of the control pipe.

A reader is expendable: a body that makes it slow or large ends it, and nothing else.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import socket
import sys
import traceback
from io import BufferedRWPair
from pathlib import Path

import msgspec

from pypto_serving.api.errors import describe
from pypto_serving.api.generation.prompts import Prompter
from pypto_serving.api.openai.body import Endpoint
from pypto_serving.api.openai.reader import BodyReader
from pypto_serving.api.reading.wire import ENDPOINTS, HEAD, SIZE_BYTES, Fault, ReaderStart, Refusal
from pypto_serving.errors import EXIT_OK, PyptoError
from pypto_serving.ipc import Parent
from pypto_serving.util import GIB, format_size

MAX_BYTES = 2 * GIB
"""Memory that a reader may take for data."""
COMPILE_S = 2.0
"""CPU time to compile the grammar of a body. Workers compile it again, and others wait for that."""
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""Short of memory, the kernel ends the process with the highest score first: a reader, and not the worker."""


def run(start: ReaderStart) -> None:
    """Answer one body after the other until the other side closes the channel. SIGPROF ends one that takes too long."""
    reader = BodyReader(Prompter.load(start.config, start.serving), start.serving)
    channel = socket.socket(fileno=start.channel).makefile("rwb")
    send(channel, b"")
    while head := channel.read(HEAD.size):
        endpoint, size, allowed_s = HEAD.unpack(head)
        raw = channel.read(size)
        signal.setitimer(signal.ITIMER_PROF, allowed_s)
        said = answer(reader, ENDPOINTS[endpoint], raw)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(channel, said)


def answer(reader: BodyReader, endpoint: Endpoint, raw: bytes) -> bytes:
    """Read one body; return the encoded ReadBody, Refusal or Fault."""
    try:
        read = reader.read(endpoint, raw)
        if read.params.guide is not None:
            signal.setitimer(signal.ITIMER_PROF, COMPILE_S)
            read = reader.check(read)
        return msgspec.msgpack.encode(read)
    except MemoryError:
        message = f"this request takes more than {format_size(MAX_BYTES)} of memory to read; send less"
        return msgspec.msgpack.encode(Refusal(400, message, "request_too_large", None))
    except PyptoError as error:
        return msgspec.msgpack.encode(Refusal.of(describe(error)))
    except Exception:
        return msgspec.msgpack.encode(Fault(traceback.format_exc()))


def send(channel: BufferedRWPair, data: bytes) -> None:
    channel.write(len(data).to_bytes(SIZE_BYTES, "little") + data)
    channel.flush()


def main() -> int:
    parent: Parent[ReaderStart] = Parent(int(sys.argv[1]), ReaderStart)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    with contextlib.suppress(OSError):  # some sandboxes have no such file
        OOM_SCORE.write_text("1000")
    run(parent.start)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
