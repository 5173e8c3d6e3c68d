"""StepStats: a snapshot of a replica, for logs, /metrics, /health, dashboards and routers."""

from __future__ import annotations

from itertools import zip_longest
from typing import ClassVar, TypeVar

import msgspec

from pypto_serving.types.tier import Tier


class TierStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Statistics of one tier below the device. Blocks are counted over all KV groups, totals since the core's start.

    - hit_tokens: prompt tokens that came from this tier.
    - queued_bytes: bytes being transferred; backlog_blocks: blocks waiting to be stored.
    - failed_blocks: blocks whose transfer failed; lost_blocks: blocks evicted from the device before they were stored.
    - refused_fills: loads that were expected to take longer than computing.
    - saved_s: computing time saved by loads, minus loading time.
    """

    tier: Tier
    writable: bool
    num_blocks: int
    held_blocks: int
    queued_bytes: int
    backlog_blocks: int
    hit_tokens: int
    loaded_blocks: int
    loaded_bytes: int
    load_s: float
    stored_blocks: int
    stored_bytes: int
    store_s: float
    evicted_blocks: int
    failed_blocks: int
    lost_blocks: int
    refused_fills: int
    saved_s: float

    TOTALS: ClassVar = (
        "hit_tokens",
        "loaded_blocks",
        "loaded_bytes",
        "load_s",
        "stored_blocks",
        "stored_bytes",
        "store_s",
        "evicted_blocks",
        "failed_blocks",
        "lost_blocks",
        "refused_fills",
        "saved_s",
    )


class StepStats(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A snapshot of a replica. Times are seconds of the host's monotonic clock.

    Of the waiting requests, `num_deferred` wait for another's prefix, for a load, or for their turn to load. `loading`
    counts those whose turn has not come, whose loads have begun, and whose blocks have come.

    Totals start with the core where the core makes the snapshot, and with the API process where that keeps it.

    `work_since_s` is the time since which there are unfinished requests, 0 when idle. `kv_usage` is the share of blocks
    in use, per KV group. `step_tokens` are the tokens of each step since the snapshot before. `prefill_per_s` and
    `decode_per_s` are the tokens per second of steps of mostly prompts and of others, 0 until measured. Rows had drafts
    to verify `num_draft_rounds` times; in `accepted_at[i]` of them the first i + 1 drafts were accepted.

    `core_s` is the time that the core worked; `packing_s`, `computing_s` and `sampling_s` are the parts of steps in the
    worker. Where a device samples, that is part of computing.
    """

    ready: bool = False
    epoch: int = 0
    last_step_s: float = 0.0
    work_since_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    loading: tuple[int, int, int] = (0, 0, 0)
    num_steps: int = 0
    step_tokens: tuple[int, ...] = ()
    step_rows: int = 0
    max_step_rows: int = 0
    num_preemptions: int = 0
    num_respawns: int = 0
    num_core_respawns: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_draft_rounds: int = 0
    num_drafts: int = 0
    accepted_at: tuple[int, ...] = ()
    prefill_per_s: float = 0.0
    decode_per_s: float = 0.0
    core_s: float = 0.0
    packing_s: float = 0.0
    computing_s: float = 0.0
    sampling_s: float = 0.0
    kv_usage: tuple[float, ...] = ()
    tiers: tuple[TierStats, ...] = ()

    TOTALS: ClassVar = (
        "epoch",
        "num_steps",
        "num_preemptions",
        "num_respawns",
        "num_core_respawns",
        "prompt_tokens",
        "generation_tokens",
        "prefix_queries",
        "prefix_hits",
        "num_draft_rounds",
        "num_drafts",
        "core_s",
        "packing_s",
        "computing_s",
        "sampling_s",
    )

    def ended(self) -> StepStats:
        """Return the totals alone: what is left of a core that ended, and is started again."""
        totals = {name: getattr(self, name) for name in self.TOTALS}
        tiers = tuple(
            msgspec.structs.replace(tier, writable=False, num_blocks=0, held_blocks=0, queued_bytes=0, backlog_blocks=0)
            for tier in self.tiers
        )
        totals["num_core_respawns"] += 1
        return StepStats(**totals, accepted_at=self.accepted_at, kv_usage=(0.0,) * len(self.kv_usage), tiers=tiers)

    def after(self, past: StepStats) -> StepStats:
        """Return this snapshot with the totals of the cores before, `past`, added."""
        tiers = tuple(map(_sum, self.tiers, past.tiers)) if past.tiers else self.tiers
        accepted_at = tuple(map(sum, zip_longest(self.accepted_at, past.accepted_at, fillvalue=0)))
        return _sum(msgspec.structs.replace(self, accepted_at=accepted_at, tiers=tiers), past)


_Stats = TypeVar("_Stats", StepStats, TierStats)


def _sum(now: _Stats, past: _Stats) -> _Stats:
    """Return `now` with the totals of `past` added."""
    totals = {name: getattr(now, name) + getattr(past, name) for name in now.TOTALS}
    return msgspec.structs.replace(now, **totals)
