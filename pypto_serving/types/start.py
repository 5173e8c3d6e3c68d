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
    """What a worker needs to start. `epoch` numbers this worker life, in which the tiers `left_out` are not used.

    With `respawned`, the replica had a worker before, perhaps of another core.

    Inherited file descriptors: `channel` to the core for steps, `transfers` to the core for transfers, `host_memory`
    of the host tier (-1 without one), and `descendants`, which the ranks that follow the worker inherit too.
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
    """What a rank needs to follow a worker: its index, and inherited file descriptors.

    They are `memory`, which ranks of a host share, and the rank's `links`, by name: to another host, or to the leader.
    """

    config: EngineConfig
    rank: int
    memory: int
    links: dict[str, int] = {}


class HostJoin(msgspec.Struct, frozen=True):
    """What a host needs to join another one, which listens at `address`.

    model, cache_dir: folders on this host, as in EngineConfig. nodes: where ranks may run.
    """

    address: str
    secret_file: str
    model: str
    cache_dir: str
    nodes: tuple[NumaNode, ...]
    num_threads: int
    log_format: LogFormat = "text"


class CoreStart(msgspec.Struct, frozen=True):
    """What an engine core needs to start. With `respawned`, a core before it had a worker that was ready.

    Inherited file descriptors: `channel` to the API process, `descendants`, which the core's workers inherit too.
    """

    config: EngineConfig
    channel: int
    descendants: int
    respawned: bool


SECRET_VARIABLE = "PYPTO_JOIN_SECRET"
LEAST_SECRET = 16
JOINED = "joined"
"""What a host reports to the process that started it."""


class HostHello(msgspec.Struct, frozen=True, tag="hello"):
    """A host joins: its `name`, the `version` of this program, and digests of its checkpoint's files by name."""

    name: str
    version: str
    files: dict[str, bytes]


class HostStart(msgspec.Struct, frozen=True, tag="start"):
    """The host may load. `life` names this life of the group: its other connections bring it along."""

    config: EngineConfig
    life: bytes


class HostHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """Sent regularly: the host is still there."""


FromHost = HostHello | HostStart | HostHeartbeat | ChildProgress | ChildFault


def read_secret(path: str) -> bytes:
    """Read the secret from a file, or else from the environment. Raises ConfigError where there is none."""
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
