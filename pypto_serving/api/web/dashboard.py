"""Answer GET /dashboard/stats: the current state, and the part of the history that the page has not seen."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pypto_serving import __version__
from pypto_serving.api.service import Service
from pypto_serving.engine.client import Monitored
from pypto_serving.engine.history import INTERVAL_S, MAX_FINISHED, MAX_SAMPLES, Sample
from pypto_serving.engine.metrics import STEP_PARTS
from pypto_serving.setup.kv_shares import MemoryPlan
from pypto_serving.types.config import EngineConfig
from pypto_serving.types.request import TierStats
from pypto_serving.types.tier import TIERS


async def show_stats(request: Request) -> Response:
    """Answer with the newest state, and the history after `samples` and `finished` of the query.

    They count what the page has seen of the `life` that the query names. If that is another one, send all.
    """
    service: Service = request.app.state.service
    query = request.query_params
    known = query.get("life") == service.history.life
    samples, finished = (_count(query.get(name, "")) if known else 0 for name in ("samples", "finished"))
    state = dashboard(service, request.app.state.memory, samples, finished, time.monotonic())
    return Response(msgspec.json.encode(state), headers={"cache-control": "no-store"}, media_type="application/json")


def _count(text: str) -> int:
    """Read a count; anything else counts as 0."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def dashboard(service: Service, memory: MemoryPlan | None, samples: int, finished: int, now_s: float) -> dict[str, Any]:
    """Collect the data of the dashboard.

    `samples` and `finished` count the entries that the page has seen. In the result, `samples` has a list per field of
    Sample; the page's next request returns `life` and `seen`.
    """
    engine, history, metrics = service.engine, service.history, service.metrics
    history.observe(now_s)
    config, topology, health = engine.config, engine.config.parallel.topology, service.health()
    unseen = history.samples_since(samples)
    return {
        "model": service.model_name,
        "version": __version__,
        "backend": config.worker.backend,
        "life": history.life,
        "now_s": now_s,
        "interval_s": INTERVAL_S,
        "max_samples": MAX_SAMPLES,
        "max_finished": MAX_FINISHED,
        "status": health.status,
        "detail": health.detail,
        "ranks": [len(topology.on_host(host)) for host in range(topology.hosts)],
        "replicas": list(map(_replica, engine.engines)),
        "groups": _groups(config),
        "tiers": TIERS,
        "used_tiers": ["device", *(tier.tier for tier in config.cache.tiers)],
        "step_parts": STEP_PARTS,
        "num_drafts": config.num_drafts,
        "memory": [] if memory is None else _parts(memory),
        "first_token_bounds_s": metrics.first_token[0].bounds,
        "next_token_bounds_s": metrics.next_token[0].bounds,
        "seen": {"samples": history.num_samples, "finished": history.num_finished},
        "samples": {name: [getattr(each, name) for each in unseen] for name in Sample.__struct_fields__},
        "finished": history.finished_since(finished),
    }


def _replica(engine: Monitored) -> dict[str, Any]:
    """Describe one engine. `epoch` counts the lives of its worker, `core_respawns` the restarts of its core."""
    stats, health = engine.stats, engine.health()
    return {
        "status": health.status,
        "detail": health.detail,
        "last_step_age_s": health.age_s,
        "epoch": stats.epoch,
        "worker_respawns": stats.num_respawns,
        "core_respawns": stats.num_core_respawns,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "steps": stats.num_steps,
        "step_rows": stats.step_rows,
        "max_step_rows": stats.max_step_rows,
        "kv_usage": stats.kv_usage,
        "tiers": [{name: getattr(tier, name) for name in TierStats.__struct_fields__} for tier in stats.tiers],
    }


def _groups(config: EngineConfig) -> list[dict[str, Any]]:
    return [
        {
            "name": group.name,
            "kind": group.kind,
            "blocks": blocks,
            "block_tokens": group.block_size,
            "block_bytes": group.block_bytes,
        }
        for group, blocks in zip(config.cache.groups, config.cache.num_blocks, strict=True)
    ]


def _parts(memory: MemoryPlan) -> list[dict[str, Any]]:
    """Describe the parts of a memory plan, each with its `tier`; `free` is the unused rest."""
    parts = [
        ("weights", "device", memory.weight_bytes),
        ("workspace", "device", memory.workspace_bytes),
        *((f"KV {group.name}", group.tier, group.total_bytes) for group in (*memory.groups, *memory.lower)),
        ("free", "device", memory.available_bytes - memory.total_bytes),
    ]
    return [{"name": name, "tier": tier, "num_bytes": size} for name, tier, size in parts if size > 0]
