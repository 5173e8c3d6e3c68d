"""Run the reader: `python -m pypto_serving.api.reading FD`. FD is its end of the control pipe.

The reader loads modules and data for jobs. Copies of it do the jobs: one that takes too much time or memory ends only
its copy, and the next copy starts in milliseconds. Since it forks, the reader must have no threads.
"""

from __future__ import annotations

import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING

import msgspec

from pypto_serving import limits
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
)
from pypto_serving.errors import EXIT_OK, PyptoError
from pypto_serving.logs import configure as configure_logs
from pypto_serving.processes import Parent, serve_copies
from pypto_serving.types.guide import Grammar
from pypto_serving.util import format_size

if TYPE_CHECKING:
    from pypto_serving.api.common.body import Endpoint

WARMING = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}')
"""Compiled once before the first copy, so that copies need not import and initialize the compiler."""
MAX_KEPT_BYTES = 512 << 20
"""A copy that has used more memory ends after its job."""
Job = Callable[[bytes], msgspec.Struct]


class Jobs:
    """Does jobs. Loads the modules and data for a kind of job before its first one; importing takes a second."""

    def __init__(self, start: ReaderStart) -> None:
        self._start = start

    def prepare(self, purpose: bytes) -> Callable[[socket.socket], None]:
        """Load everything for a first job of kind `purpose`; return the function that a copy runs."""
        self.prepared(KINDS[purpose[0]])
        return partial(answer_all, self)

    def prepared(self, kind: JobKind) -> Job:
        """Load everything for jobs of a kind; return the function that does one."""
        return self._compile if kind == "grammar" else partial(self._read, kind)

    @cached_property
    def _compile(self) -> Job:
        from pypto_serving.api.grammars import schema_errors
        from pypto_serving.guidance import GrammarError

        def compile(raw: bytes) -> Compiles | Refusal:
            grammar = msgspec.msgpack.decode(raw, type=Grammar)
            try:
                checked = schema_errors.checked(grammar)
            except GrammarError as error:
                return Refusal(error.status, str(error), error.code, None)
            return Compiles(None if checked == grammar else checked)

        schema_errors.checked(WARMING)
        return compile

    @cached_property
    def _read(self) -> Callable[..., msgspec.Struct]:
        from pypto_serving.api.http.errors import describe
        from pypto_serving.api.prompting.prompts import Prompter
        from pypto_serving.api.reading.body_reader import READERS

        start = self._start
        prompter = Prompter.load(start.config, start.serving)

        def read(kind: Endpoint, raw: bytes) -> msgspec.Struct:
            try:
                return READERS[kind](prompter, start.serving, raw)
            except PyptoError as error:
                return Refusal.of(describe(error))

        return read


def answer_all(jobs: Jobs, end: socket.socket) -> None:
    """Do the jobs that arrive on `end`, one after the other. SIGPROF ends this process if a job takes too long."""
    with end.makefile("rwb") as channel:
        channel.write(READY)
        channel.flush()
        is_last = False
        while not is_last and len(head := channel.read(JOB.size)) == JOB.size:
            kind, size, allowed_s = JOB.unpack(head)
            raw, started_s = channel.read(size), time.process_time()
            limits.limit_cpu(allowed_s)
            answer, is_last = guarded(jobs.prepared(KINDS[kind]), raw)
            said = msgspec.msgpack.encode(answer)
            limits.limit_cpu(0)
            is_last = is_last or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > MAX_KEPT_BYTES
            channel.write(ANSWER.pack(len(said), time.process_time() - started_s, is_last) + said)
            channel.flush()


def guarded(job: Job, raw: bytes) -> tuple[msgspec.Struct, bool]:
    """Do a job; return its answer, refusal or fault, and whether this process should do no further job."""
    try:
        return job(raw), False
    except MemoryError:
        message = f"this takes more than {format_size(limits.MAX_BYTES)} of memory to read; send less"
        return Refusal(400, message, "request_too_large", None), True
    except BaseException:  # a Rust panic is not an Exception
        return ReaderFault(traceback.format_exc()), True


def main() -> int:
    start = Parent.of_module(ReaderStart, watches=False).start
    configure_logs("reader", "error", start.config.log_format)  # the API process logs the rest
    limits.limit_memory()
    with socket.socket(fileno=start.control) as control:
        serve_copies(control, Jobs(start).prepare)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
