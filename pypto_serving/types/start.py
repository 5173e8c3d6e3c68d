"""The first message to a child process, over the control pipe, as one line of JSON."""

from __future__ import annotations

import msgspec

from pypto_serving.logs import LogFormat
from pypto_serving.parallel.placement import NumaNode
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.tier import Tier


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
