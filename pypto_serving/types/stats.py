"""One snapshot of a replica, for logs, /metrics, /health, dashboards and routers."""

from __future__ import annotations

import msgspec


class StepStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Counters grow from the start of the core; times are seconds of the host's monotonic clock.

    `work_since_s`: when the present stretch of work began, 0 when idle. `kv_usage`: share per KV group.
    """

    ready: bool = False
    epoch: int = 0
    last_step_s: float = 0.0
    work_since_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_steps: int = 0
    step_tokens: int = 0
    step_rows: int = 0
    max_step_rows: int = 0
    num_preemptions: int = 0
    num_respawns: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kv_usage: tuple[float, ...] = ()
