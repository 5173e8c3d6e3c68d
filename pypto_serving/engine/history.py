"""History: the last minutes of a server's engines, for its dashboard."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from operator import sub
from typing import TypeVar

import msgspec

from pypto_serving.engine.client import EngineClient
from pypto_serving.engine.metrics import STEP_PARTS, ServerMetrics
from pypto_serving.types.request import StepStats, Timeline
from pypto_serving.types.tier import TIERS

INTERVAL_S = 1.0
MAX_SAMPLES = 600
MAX_FINISHED = 200
_T = TypeVar("_T")


class Sample(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The state of all engines at one time: current load, usage of each KV group where it is fullest, and totals.

    `step_s`: seconds of each of STEP_PARTS; `hit_tokens`: cached prompt tokens from each of TIERS. `first_token` and
    `next_token`: observations since the last sample, for each bucket of the metric. `respawns`: restarts of workers
    and engine cores.
    """

    at_s: float
    running: int
    waiting: int
    kv_usage: tuple[float, ...]
    steps: int
    prompt_tokens: int
    generation_tokens: int
    preemptions: int
    respawns: int
    step_s: tuple[float, ...]
    prefix_queries: int
    hit_tokens: tuple[int, ...]
    drafts: int
    draft_rounds: int
    accepted_at: tuple[int, ...]
    first_token: tuple[int, ...]
    next_token: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A request that ended, with its tokens and times."""

    id: str
    reason: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    timeline: Timeline


class History:
    """Keeps one sample per second, and the latest requests. Owned by the server; used in the event loop's thread only.

    `num_samples` and `num_finished` are totals, so that a reader can ask for entries that it has not seen. `life`
    names this start of the server: totals and times of another one cannot be compared with these.
    """

    def __init__(self, engine: EngineClient, metrics: ServerMetrics) -> None:
        self._engine = engine
        self._histograms = (metrics.first_token, metrics.next_token)
        self._counts = self._count()
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._finished: deque[Finished] = deque(maxlen=MAX_FINISHED)
        self._due_s = 0.0
        self.life = secrets.token_hex(8)
        self.num_samples = 0
        self.num_finished = 0

    def observe(self, now_s: float) -> None:
        """Take a sample if the last one is INTERVAL_S old."""
        if now_s < self._due_s:
            return
        self._due_s = now_s + INTERVAL_S
        before, self._counts = self._counts, self._count()
        first, following = (tuple(map(sub, *pair)) for pair in zip(self._counts, before, strict=True))
        stats = [engine.stats for engine in self._engine.engines]
        self._samples.append(sample_of(stats, now_s, first, following))
        self.num_samples += 1

    def _count(self) -> list[list[int]]:
        """Return the observations of all engines in each bucket, for both histograms."""
        return [list(map(sum, zip(*(one.counts for one in each), strict=True))) for each in self._histograms]

    def finish(self, request: Finished) -> None:
        """Remember a request that ended."""
        self._finished.append(request)
        self.num_finished += 1

    def samples_since(self, seen: int) -> list[Sample]:
        """Return the samples after the first `seen` ones, as far as they are kept."""
        return _latest(self._samples, self.num_samples - seen)

    def finished_since(self, seen: int) -> list[Finished]:
        """Return the finished requests after the first `seen` ones, as far as they are kept."""
        return _latest(self._finished, self.num_finished - seen)


def sample_of(stats: Sequence[StepStats], now_s: float, first: tuple[int, ...], following: tuple[int, ...]) -> Sample:
    """Add up the newest snapshots of all engines."""

    def total(name: str) -> int:
        return sum(getattr(each, name) for each in stats)

    lower = [sum(tier.hit_tokens for each in stats for tier in each.tiers if tier.tier == name) for name in TIERS[1:]]
    usages = [each.kv_usage for each in stats if each.kv_usage]
    return Sample(
        at_s=now_s,
        running=total("num_running"),
        waiting=total("num_waiting"),
        kv_usage=tuple(map(max, zip(*usages, strict=True))),
        steps=total("num_steps"),
        prompt_tokens=total("prompt_tokens"),
        generation_tokens=total("generation_tokens"),
        preemptions=total("num_preemptions"),
        respawns=total("num_respawns") + total("num_core_respawns"),
        step_s=tuple(sum(getattr(each, f"{part}_s") for each in stats) for part in STEP_PARTS),
        prefix_queries=total("prefix_queries"),
        hit_tokens=(max(0, total("prefix_hits") - sum(lower)), *lower),
        drafts=total("num_drafts"),
        draft_rounds=total("num_draft_rounds"),
        accepted_at=_sums(each.accepted_at for each in stats),
        first_token=first,
        next_token=following,
    )


def _sums(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sum rows of different lengths, column by column."""
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def _latest(kept: deque[_T], count: int) -> list[_T]:
    return list(kept)[-count:] if count > 0 else []
