"""Run a guide process: `python -m pypto_serving.worker.guiding FD`. FD is its end of the control pipe.

It is expendable: what makes it slow or large ends it, and the worker starts another.
"""

from __future__ import annotations

import os
import socket
import sys

from pypto_serving.errors import EXIT_OK
from pypto_serving.ipc import SocketChannel
from pypto_serving.limits import ProcessMemory, limit_memory
from pypto_serving.processes import Parent
from pypto_serving.types.guide import MAX_MATCHER_BYTES
from pypto_serving.worker.guiding.server import GuideServer
from pypto_serving.worker.guiding.wire import GuideStart, SharedMasks, ToGuides

IDLE_S = 10.0
"""How long the process is silent without work."""
BASE_BYTES = 1 << 30
"""Memory for all but the matchers."""


def main() -> int:
    parent = Parent.of_module(GuideStart)
    start = parent.start
    if start.cpus:
        os.sched_setaffinity(0, start.cpus)
    channel: SocketChannel[ToGuides] = SocketChannel(socket.socket(fileno=start.channel), ToGuides)
    shared = SharedMasks(start.memory, start.max_rows, start.vocab_size, start.max_drafts)
    limit_memory(MAX_MATCHER_BYTES + BASE_BYTES)
    following = GuideServer(channel, shared, start.model_dir, start.vocab_size, ProcessMemory())
    while not channel.gone:
        following.turn(IDLE_S)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
