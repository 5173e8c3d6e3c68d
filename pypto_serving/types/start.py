"""First messages to child processes, as one line of JSON over the control pipe, and the messages between two hosts."""

from __future__ import annotations

import os

import msgspec

from pypto_serving.errors import ConfigError
from pypto_serving.logs import LogFormat
from pypto_serving.parallel.topology import NumaNode
from pypto_serving.processes import ChildFault, ChildProgress
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.tier import Tier
from pypto_serving.util import counted, read_regular


class WorkerStart(msgspec.Struct, frozen=True):
    """Start parameters of a worker. `epoch`: number of this worker life, which does not use the tiers `left_out`.

    `respawned`: the replica had a worker before, perhaps under another core.

    Inherited file descriptors: `channel` to the core for steps, `transfers` to the core for transfers, `host_memory`
    of the host tier (-1 without one), and `descendants`, which the worker's ranks also inherit.
    """

    config: EngineConfig
    channel: int
    transfers: int
    host_memory: int
    descendants: tuple[int, ...]
    epoch: int
    respawned: bool
    left_out: tuple[Tier, ...] = ()


class RankStart(msgspec.Struct, frozen=True):
    """Start parameters of a rank: its index, and inherited file descriptors.

    `memory` is shared by the ranks of a host; `links`, by name, lead to another host or to the leader.
    """

    config: EngineConfig
    rank: int
    memory: int
    links: dict[str, int] = {}


class HostJoin(msgspec.Struct, frozen=True):
    """Parameters for joining the host that listens at `address`.

    model, cache_dir: folders on this host, as in EngineConfig. nodes: NUMA nodes for ranks.
    """

    address: str
    secret_file: str
    model: str
    cache_dir: str
    nodes: tuple[NumaNode, ...]
    num_threads: int
    log_format: LogFormat = "text"


class CoreStart(msgspec.Struct, frozen=True):
    """Start parameters of an engine core. `respawned`: an earlier core had a ready worker.

    Inherited file descriptors: `channel` to the API process, `descendants`, which the core's workers also inherit.
    """

    config: EngineConfig
    channel: int
    descendants: int
    respawned: bool


SECRET_VARIABLE = "PYPTO_JOIN_SECRET"
LEAST_SECRET = 16
JOINED = "joined"
"""Phase that a joined host reports to the process that started it."""


class HostHello(msgspec.Struct, frozen=True, tag="hello"):
    """A host joins: its `name`, the `version` of this program, and digests of its checkpoint's files by name."""

    name: str
    version: str
    files: dict[str, bytes]


class HostStart(msgspec.Struct, frozen=True, tag="start"):
    """The host may load. `life` identifies this life of the group; the host's other connections must send it."""

    config: EngineConfig
    life: bytes


class HostHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent regularly by a live host."""


FromHost = HostHello | HostStart | HostHeartbeat | ChildProgress | ChildFault


def read_secret(path: str) -> bytes:
    """Read the secret from a file, or else from the environment. Raises ConfigError if there is none."""
    try:
        secret = (read_regular(path) if path else os.environ.get(SECRET_VARIABLE, "").encode()).strip()
    except OSError as error:
        raise ConfigError(f"the secret of hosts cannot be read from {path}: {os.strerror(error.errno or 0)}") from None
    if not path and not secret:
        raise ConfigError(
            f"hosts need a secret: set {SECRET_VARIABLE} or give the option join-secret-file; at least {LEAST_SECRET} "
            "bytes"
        )
    if len(secret) < LEAST_SECRET:
        raise ConfigError(
            f"the secret of hosts in {path or SECRET_VARIABLE} has {counted(len(secret), 'byte')}, but must have at "
            f"least {LEAST_SECRET}"
        )
    return secret
