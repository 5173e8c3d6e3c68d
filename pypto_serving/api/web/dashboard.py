"""Answer GET /dashboard/stats: what the dashboard shows, and what it has not seen of the history."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving import __version__
from pypto_serving.api.service import Service
from pypto_serving.engine.client import Monitored
from pypto_serving.engine.history import INTERVAL_S, MAX_FINISHED, MAX_SAMPLES, Finished, Sample
from pypto_serving.engine.metrics import STEP_PARTS
from pypto_serving.setup.kv_shares import MemoryPlan
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import TierStats
from pypto_serving.types.tier import TIERS


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `epoch` counts the lives of its worker, `core_respawns` the restarts of its core."""

    status: str
    detail: str
    last_step_age_s: float
    epoch: int
    worker_respawns: int
    core_respawns: int
    running: int
    waiting: int
    steps: int
    step_rows: int
    max_step_rows: int
    kv_usage: tuple[float, ...]
    tiers: tuple[dict[str, Any], ...]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV group of a replica."""

    name: str
    kind: str
    blocks: int
    block_tokens: int
    block_bytes: int


class MemoryPart(msgspec.Struct, frozen=True):
    """Part of the memory plan of a replica; `tier` is where it lies, `free` is what the plan leaves."""

    name: str
    tier: str
    num_bytes: int


class Seen(msgspec.Struct, frozen=True):
    """How many samples and finished requests there were; the next question names both."""

    samples: int
    finished: int


class Dashboard(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of GET /dashboard/stats. `samples` has a list for each field of Sample."""

    model: str
    version: str
    backend: str
    interval_s: float
    max_samples: int
    max_finished: int
    status: str
    detail: str
    ranks: tuple[int, ...]
    replicas: list[Replica]
    groups: list[Group]
    tiers: tuple[str, ...]
    used_tiers: tuple[str, ...]
    step_parts: tuple[str, ...]
    num_drafts: int
    memory: list[MemoryPart]
    first_token_bounds_s: list[float]
    next_token_bounds_s: list[float]
    seen: Seen
    samples: dict[str, list[Any]]
    finished: list[Finished]


async def show_stats(request: Request) -> Response:
    """Answer with the newest state, and the history after `samples` and `finished` of the query."""
    service: Service = request.app.state.service
    samples, finished = (_count(request.query_params.get(name, "")) for name in ("samples", "finished"))
    state = dashboard(service, request.app.state.memory, samples, finished, time.monotonic())
    return Response(msgspec.json.encode(state), headers={"cache-control": "no-store"}, media_type="application/json")


def _count(text: str) -> int:
    """Read a count; what is none counts as nothing seen."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def dashboard(service: Service, memory: MemoryPlan | None, samples: int, finished: int, now_s: float) -> Dashboard:
    """Collect what the dashboard shows; a reader that has seen more than there is sees all."""
    engine, history, metrics = service.engine, service.history, service.metrics
    history.observe(now_s)
    config, topology, health = engine.config, engine.config.parallel.topology, service.health()
    unseen = history.samples_since(samples if samples <= history.num_samples else 0)
    return Dashboard(
        model=service.model_name,
        version=__version__,
        backend=config.worker.backend,
        interval_s=INTERVAL_S,
        max_samples=MAX_SAMPLES,
        max_finished=MAX_FINISHED,
        status=health.status,
        detail=health.detail,
        ranks=tuple(len(topology.on_host(host)) for host in range(topology.hosts)),
        replicas=[_replica(each) for each in engine.engines],
        groups=_groups(config),
        tiers=TIERS,
        used_tiers=("device", *(tier.tier for tier in config.cache.tiers)),
        step_parts=STEP_PARTS,
        num_drafts=config.num_drafts,
        memory=[] if memory is None else _parts(memory),
        first_token_bounds_s=metrics.first_token.bounds,
        next_token_bounds_s=metrics.next_token.bounds,
        seen=Seen(history.num_samples, history.num_finished),
        samples={name: [getattr(each, name) for each in unseen] for name in Sample.__struct_fields__},
        finished=history.finished_since(finished if finished <= history.num_finished else 0),
    )


def _replica(engine: Monitored) -> Replica:
    stats, health = engine.stats, engine.health()
    return Replica(
        status=health.status,
        detail=health.detail,
        last_step_age_s=health.age_s,
        epoch=stats.epoch,
        worker_respawns=stats.num_respawns,
        core_respawns=stats.num_core_respawns,
        running=stats.num_running,
        waiting=stats.num_waiting,
        steps=stats.num_steps,
        step_rows=stats.step_rows,
        max_step_rows=stats.max_step_rows,
        kv_usage=stats.kv_usage,
        tiers=tuple(map(_tier, stats.tiers)),
    )


def _tier(tier: TierStats) -> dict[str, Any]:
    return {name: getattr(tier, name) for name in TierStats.__struct_fields__}


def _groups(config: EngineConfig) -> list[Group]:
    return [
        Group(
            name=group.name,
            kind=group.kind,
            blocks=blocks,
            block_tokens=group.block_size,
            block_bytes=group.block_bytes,
        )
        for group, blocks in zip(config.cache.groups, config.cache.num_blocks, strict=True)
    ]


def _parts(memory: MemoryPlan) -> list[MemoryPart]:
    parts = [
        MemoryPart("weights", "device", memory.weight_bytes),
        MemoryPart("workspace", "device", memory.workspace_bytes),
        *(MemoryPart(f"KV {group.name}", group.tier, group.total_bytes) for group in (*memory.groups, *memory.lower)),
        MemoryPart("free", "device", memory.available_bytes - memory.total_bytes),
    ]
    return [part for part in parts if part.num_bytes > 0]
