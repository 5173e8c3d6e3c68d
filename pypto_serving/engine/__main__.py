"""Run the engine core process: `python -m pypto_serving.engine FD`. FD is its end of the control pipe."""

from __future__ import annotations

import socket
import sys
import time

from pypto_serving.engine.core import EngineCore
from pypto_serving.engine.worker_process import WorkerProcess
from pypto_serving.ipc import SocketChannel
from pypto_serving.logs import configure as configure_logs
from pypto_serving.processes import Parent, run_child
from pypto_serving.types.request import ToCore
from pypto_serving.types.start import CoreStart

FLUSH_S = 3.0
"""Limit of the time that a shutdown waits for stores to lower tiers."""


def run(parent: Parent[CoreStart]) -> None:
    """Run turns until ShutdownCore, and sleep in between. Then wait for stores to finish, at most FLUSH_S."""
    start = parent.start
    configure_logs(start.config.process_name("core"), start.config.log_level, start.config.log_format)
    channel: SocketChannel[ToCore] = SocketChannel(socket.socket(fileno=start.channel), ToCore)
    executor = WorkerProcess(start.config, (start.descendants,), start.respawned)
    publisher, config = None, start.config
    if config.cache.kv_events:
        from pypto_serving.engine.kv_events import KVEventPublisher  # imports ZeroMQ

        publisher = KVEventPublisher(
            config.cache.groups, config.cache.kv_events, config.cache.kv_events_replay, config.parallel.replica
        )
    try:
        core = EngineCore(start.config, channel, executor, time.monotonic, publisher)
        while True:
            core.turn()
            if core.stopping:
                break
            executor.wait(channel, start.config.faults.heartbeat_s)
        deadline_s = time.monotonic() + FLUSH_S
        while not core.at_rest and (left_s := deadline_s - time.monotonic()) > 0:
            executor.wait(channel, left_s)
            core.turn()
    finally:
        executor.stop()
        if publisher is not None:
            publisher.stop()
    channel.close(linger_s=1.0)


if __name__ == "__main__":
    sys.exit(run_child(run, CoreStart))
