"""Run a guide process: `python -m pypto_serving.worker.guiding FD`. FD is its end of the control pipe.

It loads the tokenizer. A copy of it follows rows, so that a grammar that is slow or large ends a copy alone, and the
next one starts in milliseconds.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import partial

from pypto_serving.errors import EXIT_OK
from pypto_serving.ipc import SocketChannel
from pypto_serving.limits import IDLE_S, ProcessMemory, ThreadCpuLimit, limit_memory
from pypto_serving.processes import Parent, serve_copies
from pypto_serving.worker.guiding.server import GuideServer, load_compiler
from pypto_serving.worker.guiding.wire import GuideStart, SharedMasks, ToGuides


def follow(start: GuideStart, shared: SharedMasks, end: socket.socket) -> None:
    """Follow the rows that come on `end`, until it is closed, or there are none for long."""
    channel: SocketChannel[ToGuides] = SocketChannel(end, ToGuides)
    server = GuideServer(channel, shared, start.model_dir, start.vocab_size, ProcessMemory(), ThreadCpuLimit())
    while not channel.gone and not server.has_been_idle(IDLE_S):
        server.turn(1.0)


def main() -> int:
    start = Parent.of_module(GuideStart, watches=False).start
    shared = SharedMasks(start.memory, start.max_rows, start.vocab_size, start.max_drafts)

    def prepare(eos_ids: bytes) -> Callable[[socket.socket], None]:
        load_compiler(start.model_dir, start.vocab_size, eos_ids)
        return partial(follow, start, shared)

    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    limit_memory()
    with socket.socket(fileno=start.control) as control:
        serve_copies(control, prepare, ends_idle=True)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
