"""StepStats: a snapshot of a replica, for logs, /metrics, /health, dashboards and routers."""

from __future__ import annotations

from itertools import zip_longest
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from pypto_serving.types.tier import Tier


class TierTotals(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Totals of one tier below the device, since the core's start.

    - hit_tokens: prompt tokens that came from this tier.
    - failed_blocks: blocks whose transfer failed; lost_blocks: blocks evicted from the device before they were stored.
    - refused_fills: loads that were expected to take longer than computing.
    - saved_s: computing time saved by loads, minus loading time.
    """

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


class TierStats(TierTotals, frozen=True, kw_only=True, array_like=True, gc=False):
    """Statistics of one tier. Blocks are counted over all KV groups.

    queued_bytes: bytes being transferred; backlog_blocks: blocks waiting to be stored.
    """

    tier: Tier
    writable: bool
    num_blocks: int
    held_blocks: int
    queued_bytes: int
    backlog_blocks: int


class StepTotals(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Totals of a replica, since the core's start where the core counts, and since the API process' start there.

    Rows had drafts to verify `num_draft_rounds` times. `core_s` is the time that the core worked; `packing_s`,
    `computing_s` and `sampling_s` are the parts of steps in the worker. Where a device samples, that is part of
    computing.
    """

    epoch: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_respawns: int = 0
    num_core_respawns: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_draft_rounds: int = 0
    num_drafts: int = 0
    core_s: float = 0.0
    packing_s: float = 0.0
    computing_s: float = 0.0
    sampling_s: float = 0.0


class StepStats(StepTotals, frozen=True, kw_only=True, array_like=True, gc=False):
    """A snapshot of a replica. Times are seconds of the host's monotonic clock.

    - last_step_s: when a step last ended; work_since_s: since when there are unfinished requests, 0 when idle.
    - num_deferred: waiting requests that wait for another's prefix, for a load, or for their turn to load.
    - loading: how many wait for their turn, have loads that run, and have loads that ended.
    - step_tokens: the tokens of each step since the snapshot before.
    - accepted_at[i]: how often the first i + 1 drafts of a row were accepted, in total.
    - prefill_per_s, decode_per_s: tokens per second of steps of mostly prompts and of others, 0 until measured.
    - kv_usage: the share of blocks in use, per KV group.
    """

    ready: bool = False
    last_step_s: float = 0.0
    work_since_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    loading: tuple[int, int, int] = (0, 0, 0)
    step_tokens: tuple[int, ...] = ()
    step_rows: int = 0
    max_step_rows: int = 0
    accepted_at: tuple[int, ...] = ()
    prefill_per_s: float = 0.0
    decode_per_s: float = 0.0
    kv_usage: tuple[float, ...] = ()
    tiers: tuple[TierStats, ...] = ()

    def ended(self) -> StepStats:
        """Return the totals alone, for a core that ended and is started again."""
        totals = {name: getattr(self, name) for name in StepTotals.__struct_fields__}
        totals["num_core_respawns"] += 1
        gauges = {"writable": False, "num_blocks": 0, "held_blocks": 0, "queued_bytes": 0, "backlog_blocks": 0}
        tiers = tuple(replace(tier, **gauges) for tier in self.tiers)
        return StepStats(**totals, accepted_at=self.accepted_at, kv_usage=(0.0,) * len(self.kv_usage), tiers=tiers)

    def after(self, past: StepStats) -> StepStats:
        """Return this snapshot with the totals of the cores before, `past`, added."""
        tiers = [_add(TierTotals, *pair) for pair in zip(self.tiers, past.tiers, strict=False)] or self.tiers
        accepted_at = tuple(map(sum, zip_longest(self.accepted_at, past.accepted_at, fillvalue=0)))
        return replace(_add(StepTotals, self, past), accepted_at=accepted_at, tiers=tuple(tiers))


_Stats = TypeVar("_Stats", StepStats, TierStats)


def _add(totals: type[StepTotals | TierTotals], now: _Stats, past: _Stats) -> _Stats:
    """Return `now` with the `totals` of `past` added."""
    return replace(now, **{name: getattr(now, name) + getattr(past, name) for name in totals.__struct_fields__})
