"""Run a host that joins another for one life of their replica: `python -m pypto_serving.backend.ranks.joining_host FD`.

FD is this process's end of the control pipe. Its parent starts a new such process after each life.
"""

from __future__ import annotations

import logging
import platform
import socket
import sys
import time
from collections import defaultdict

import msgspec

from pypto_serving.backend.ranks.host_connections import (
    CONTROL,
    HANDSHAKE_S,
    ControlConnection,
    HandshakeError,
    HostChannel,
    Purpose,
    connect,
)
from pypto_serving.backend.ranks.rank_process import run_rank
from pypto_serving.backend.ranks.serving_host import program_version
from pypto_serving.backend.ranks.shared_steps import READY
from pypto_serving.backend.ranks.supervisor import RankError, RankSupervisor
from pypto_serving.errors import ConfigError, PyptoError
from pypto_serving.kernels import SharedMemory
from pypto_serving.logs import configure as configure_logs
from pypto_serving.model.fingerprint import file_digests
from pypto_serving.parallel.topology import Placement, place_ranks
from pypto_serving.processes import ChildFault, ChildProgress, Parent, run_child
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.start import JOINED, HostHello, HostJoin, HostStart, read_secret
from pypto_serving.util import Clock

log = logging.getLogger(__name__)

AGAIN_S, LINK_AGAIN_S, REMINDED_S = 0.5, 0.05, 60.0
ANSWER_S = 60.0
"""Limit of the time until the serving host answers; it handles one host after the other."""


def run(parent: Parent[HostJoin]) -> None:
    """Join the serving host, and run the ranks that it assigns to this host until the replica's life ends."""
    join = parent.start
    configure_logs("host", "info", join.log_format)
    secret = read_secret(join.secret_file)
    log.info("joining %s with the model in %s", join.address, join.model)
    files = file_digests(join.model, join.cache_dir, parent.progress)
    channel = HostChannel(_arrive(join.address, secret, Reminder(time.monotonic)))
    channel.send(HostHello(platform.node(), program_version(), files))
    start = channel.receive(ANSWER_S)
    if isinstance(start, ChildFault):
        raise ConfigError(f"{join.address} refuses this host: {start.message}")
    if not isinstance(start, HostStart):
        raise RankError(f"{join.address} did not answer")
    _serve(join, secret, channel, start, parent)


class Reminder:
    """Decides when to log a reminder of an ongoing wait: every REMINDED_S."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._logged_s = clock, clock()

    def due(self) -> bool:
        """Return True if it is time to log again."""
        if self._clock() - self._logged_s < REMINDED_S:
            return False
        self._logged_s += REMINDED_S
        return True


def _arrive(address: str, secret: bytes, reminder: Reminder) -> socket.socket:
    """Connect as soon as the serving host listens. Raises ConfigError if the address or the secret is wrong."""
    while True:
        try:
            return connect(address, secret, CONTROL)
        except HandshakeError as error:
            raise ConfigError(f"{address} cannot be joined: {error}") from None
        except OSError as error:  # the serving host does not listen yet, or serves with another host
            if isinstance(error, socket.gaierror) and error.errno != socket.EAI_AGAIN:
                raise ConfigError(f"{address} is not the address of a host: {error.strerror}") from None
            if reminder.due():
                log.info("still waiting for %s: %s", address, (error.strerror or str(error)).lower())
            time.sleep(AGAIN_S)


def _serve(join: HostJoin, secret: bytes, channel: HostChannel, start: HostStart, parent: Parent[HostJoin]) -> None:
    topology, links = start.config.parallel.topology, defaultdict[int, dict[str, int]](dict)
    deadline_s = time.monotonic() + HANDSHAKE_S
    for name, (_, rank) in topology.connections.items():
        links[rank][name] = _connected(join, secret, Purpose(name, start.life), deadline_s)
    control = ControlConnection(channel, start.config.faults)
    ranks, memory, members = topology.on_host(1), SharedMemory.create(), RankSupervisor()
    members.add("the serving host", control, ready=True)
    try:
        members.start(run_rank, _localized(start.config, join), ranks, memory.fd, links)
        members.await_ready(lambda *progress: control.send(ChildProgress(*progress)))
        control.send(ChildProgress(READY, 1, 1))
        parent.progress(JOINED, 1, 1)
        members.await_end()
    except PyptoError as error:
        control.send(ChildFault(f"on host {platform.node()}: {error}", error.exit_code))
        raise
    finally:
        control.close()
        members.end()


def _connected(join: HostJoin, secret: bytes, purpose: Purpose, deadline_s: float) -> int:
    """Connect, and retry until the deadline: the serving host may drop a handshake when there are too many."""
    while True:
        try:
            return connect(join.address, secret, purpose).detach()
        except (OSError, HandshakeError) as error:
            if time.monotonic() > deadline_s:
                raise RankError(f"{join.address} cannot be joined: {error}") from None
            time.sleep(LINK_AGAIN_S)


def _localized(config: EngineConfig, join: HostJoin) -> EngineConfig:
    """Return the configuration with this host's folders, and its CPUs for its ranks."""
    ranks, own = config.parallel.topology.ranks, config.parallel.topology.on_host(1)
    places = iter(place_ranks(join.nodes, len(own), join.num_threads))
    placements = tuple(next(places) if rank in own else Placement() for rank in ranks)
    packed_cache = join.cache_dir if config.worker.packed_cache else ""
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=join.model),
        parallel=msgspec.structs.replace(config.parallel, placements=placements),
        worker=msgspec.structs.replace(config.worker, cache_dir=join.cache_dir, packed_cache=packed_cache),
    )


if __name__ == "__main__":
    sys.exit(run_child(run, HostJoin))
