"""Data-parallel replicas: each has its share of the machine, and endpoints and folders of its own."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pypto_serving.parallel.topology import Placement
from pypto_serving.setup.events import endpoint_of
from pypto_serving.setup.host import HostFacts
from pypto_serving.types.config import CacheConfig, EngineConfig
from pypto_serving.types.tier import TierConfig


def host_share(host: HostFacts, count: int) -> HostFacts:
    """Return the part of the machine that each of `count` replicas has, with the nodes of the first."""
    return msgspec.structs.replace(
        host,
        num_replicas=count,
        available_bytes=host.available_bytes // count,
        num_cpus=max(1, host.num_cpus // count),
        nodes=host.nodes[: max(1, len(host.nodes) // count)],
    )


def replicate(engine: EngineConfig, count: int, placements: Sequence[Placement]) -> tuple[EngineConfig, ...]:
    """Return the configuration of each replica. `placements` are of all ranks of all replicas."""
    ranks = len(placements) // count
    return tuple(
        msgspec.structs.replace(
            engine,
            cache=_own_cache(engine.cache, index),
            parallel=msgspec.structs.replace(
                engine.parallel, replica=index, placements=tuple(placements[index * ranks : (index + 1) * ranks])
            ),
        )
        for index in range(count)
    )


def _own_cache(cache: CacheConfig, index: int) -> CacheConfig:
    """Give a replica endpoints and folders of its own."""
    return msgspec.structs.replace(
        cache,
        tiers=tuple(_own(tier, index) for tier in cache.tiers),
        kv_events=endpoint_of(cache.kv_events, index),
        kv_events_replay=endpoint_of(cache.kv_events_replay, index),
    )


def _own(tier: TierConfig, index: int) -> TierConfig:
    """Give a replica a folder of its own, since one process writes a folder; the first has the given one."""
    if tier.tier != "disk" or index == 0:
        return tier
    return msgspec.structs.replace(tier, place=f"{tier.place}/replica-{index}")
