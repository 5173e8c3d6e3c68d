"""Run the reader: `python -m pypto_serving.api.reading FD`. FD is its end of the control pipe.

It prepares what jobs need. Copies of it do them, so that a job that takes too much time or memory ends a copy alone,
and the next one starts in milliseconds. So it must have no threads.
"""

from __future__ import annotations

import gc
import logging
import resource
import select
import signal
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
    END,
    JOB,
    KINDS,
    NO_COPY,
    NOT_PREPARED,
    READY,
    START,
    Compiles,
    JobKind,
    ReaderFault,
    ReaderStart,
    Refusal,
)
from pypto_serving.errors import EXIT_OK, PyptoError
from pypto_serving.logs import configure as configure_logs
from pypto_serving.processes import Copy, Parent, close_all_but
from pypto_serving.types.guide import Grammar
from pypto_serving.util import format_size

if TYPE_CHECKING:
    from pypto_serving.api.common.body import Endpoint

WARMING = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "string", "pattern": "^a"}}}')
"""Compiled once before the first copy, so that each need not import and initialize what it takes."""
MAX_KEPT_BYTES = 512 << 20
"""A copy that took more memory ends after its job."""
Job = Callable[[bytes], msgspec.Struct]
logger = logging.getLogger("pypto_serving.api")


class Jobs:
    """Does jobs. What those of a kind need is loaded before the first of them; importing it takes a second."""

    def __init__(self, start: ReaderStart) -> None:
        self._start = start

    def prepared(self, kind: JobKind) -> Job:
        """Load what jobs of a kind need; return what does one."""
        return self._compile if kind == "grammar" else partial(self._read, kind)

    @cached_property
    def _compile(self) -> Job:
        from pypto_serving.api.grammars import schema_errors
        from pypto_serving.guidance import GrammarError

        def compile(raw: bytes) -> Compiles | Refusal:
            grammar, started_s = msgspec.msgpack.decode(raw, type=Grammar), time.thread_time()
            try:
                checked = schema_errors.checked(grammar)
            except GrammarError as error:
                return Refusal(error.status, str(error), error.error_code, None)
            used_s = (
                time.thread_time() - started_s
            )  # the clock of the process stands still between ticks while it is limited
            return Compiles(None if checked == grammar else checked, used_s)

        schema_errors.checked(WARMING)
        return compile

    @cached_property
    def _read(self) -> Callable[..., msgspec.Struct]:
        from pypto_serving.api.http.errors import describe
        from pypto_serving.api.prompting.prompts import Prompter
        from pypto_serving.api.reading.body_reader import BodyReader

        reader = BodyReader(Prompter.load(self._start.config, self._start.serving), self._start.serving)

        def read(kind: Endpoint, raw: bytes) -> msgspec.Struct:
            try:
                return reader.read(kind, raw)
            except PyptoError as error:
                return Refusal.of(describe(error))

        return read


def serve(control: socket.socket, jobs: Jobs) -> None:
    """Start the copies that are asked for on `control`, until the other side closes it; say there how each ended."""
    poller, copies = select.poll(), dict[int, tuple[socket.socket, int, Copy]]()
    poller.register(control, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd != control.fileno():
                ended, number, copy = copies.pop(fd)
                poller.unregister(fd)
                ended.close()
                before_s = used_by_copies_s()
                code = copy.wait()
                control.send(END.pack(number, code, used_by_copies_s() - before_s))
                continue
            head, fds, _, _ = socket.recv_fds(control, START.size, 1)
            if not head:
                return
            number, kind = START.unpack(head)
            try:
                ended, copy = start_copy(fds, jobs, KINDS[kind])
            except OSError:
                control.send(END.pack(number, NO_COPY, 0.0))
            except Exception:
                logger.exception("the reader cannot load what it needs")
                control.send(END.pack(number, NOT_PREPARED, 0.0))
            else:
                copies[ended.fileno()] = ended, number, copy
                poller.register(ended, select.POLLHUP)


def start_copy(fds: list[int], jobs: Jobs, kind: JobKind) -> tuple[socket.socket, Copy]:
    """Start a copy that takes jobs; return it and a socket whose other end is closed when it ends. Raises OSError."""
    if not fds:
        raise OSError("the socket of the copy did not arrive: there are too many files")
    with socket.socket(fileno=fds[0]) as end:
        jobs.prepared(kind)
        ours, theirs = socket.socketpair()

        def work() -> None:
            gc.freeze()  # else a collection would copy all pages of this process
            close_all_but({end.fileno(), theirs.fileno()})
            answer_all(end, jobs)

        with theirs:
            try:
                return ours, Copy(work)
            except OSError:
                ours.close()
                raise


def answer_all(end: socket.socket, jobs: Jobs) -> None:
    """Do the jobs that come on `end`, one after the other. SIGPROF ends this process if one takes too long."""
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
    """Return the answer, or what became of it instead, and whether this process should do no other job."""
    try:
        return job(raw), False
    except MemoryError:
        message = f"this takes more than {format_size(limits.MAX_BYTES)} of memory to read; send less"
        return Refusal(400, message, "request_too_large", None), True
    except BaseException:  # a panic of Rust is no Exception
        return ReaderFault(traceback.format_exc()), True


def used_by_copies_s() -> float:
    """Return the CPU time of all copies that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    start = Parent.of_module(ReaderStart, watches=False).start
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may have had it ignored: then no copy could be waited for
    configure_logs("reader", "error", start.config.log_format)  # the server says the rest
    limits.limit_memory()
    with socket.socket(fileno=start.control) as control:
        serve(control, Jobs(start))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
