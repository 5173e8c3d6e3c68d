"""`python -m pypto_serving.worker FD`: a worker process; FD is its end of the control pipe."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable

from pypto_serving.backend import BACKENDS
from pypto_serving.backend.base import Backend
from pypto_serving.errors import EXIT_OK, PyptoError
from pypto_serving.ipc import Parent, SocketChannel
from pypto_serving.types.start import WorkerStart
from pypto_serving.types.step import ToWorker
from pypto_serving.worker.loop import serve
from pypto_serving.worker.runner import PlanExecutor, Runner, hello

Wrap = Callable[[Runner], PlanExecutor]


def run(parent: Parent[WorkerStart], wrap: Wrap) -> None:
    """Open the backend, allocate its buffers, prepare the program, then open the channel and serve."""
    start, started_s = parent.start, time.monotonic()
    backend: Backend = BACKENDS.load(start.config.backend)(start.config)
    buffers = backend.allocate()
    program = backend.prepare(parent.progress)
    backend.pin_main_thread()
    runner = wrap(Runner(program, buffers))
    channel: SocketChannel[ToWorker] = SocketChannel(socket.socket(fileno=start.channel), ToWorker)
    greeting = hello(program, start.epoch, time.monotonic() - started_s)
    serve(channel, greeting, runner, start.config.faults.heartbeat_s)


def main(wrap: Wrap = lambda runner: runner) -> int:
    """Run one worker life; returns its exit code."""
    parent: Parent[WorkerStart] = Parent(int(sys.argv[1]), WorkerStart)
    try:
        run(parent, wrap)
    except PyptoError as error:
        parent.fault(str(error), error.exit_code)
        return error.exit_code
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
