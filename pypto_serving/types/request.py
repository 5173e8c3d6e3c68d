"""Messages between the API process and the engine core, and snapshots of a replica."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby, zip_longest
from operator import attrgetter
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from pypto_serving.types.arrays import ID_BYTES
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import PromptLogprobs, TokenLogprobs
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
    """Totals of a replica: in the core, since its start; in the API process, since that process's start.

    `num_draft_rounds`: how often a row had drafts to verify. `core_s`: working time of the core. `packing_s`,
    `computing_s`, `sampling_s`: time of these parts of steps in the worker; sampling on a device counts as computing.
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

    - last_step_s: end of the last step; work_since_s: since then there are unfinished requests, 0 when idle.
    - num_deferred: waiting requests that wait for another's prefix, for a load, or for their turn to load.
    - loading: numbers of requests that wait for their turn to load, are loading, and have loaded.
    - step_tokens: the tokens of each step since the last snapshot.
    - accepted_at[i]: how often the first i + 1 drafts of a row were accepted, in total.
    - prefill_per_s, decode_per_s: tokens per second of steps of mostly prompts, and of others; 0 until measured.
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
        """Return only the totals, for a core that has ended and will be restarted."""
        totals = {name: getattr(self, name) for name in StepTotals.__struct_fields__}
        totals["num_core_respawns"] += 1
        gauges = {"writable": False, "num_blocks": 0, "held_blocks": 0, "queued_bytes": 0, "backlog_blocks": 0}
        tiers = tuple(replace(tier, **gauges) for tier in self.tiers)
        return StepStats(**totals, accepted_at=self.accepted_at, kv_usage=(0.0,) * len(self.kv_usage), tiers=tiers)

    def after(self, past: StepStats) -> StepStats:
        """Return this snapshot plus the totals of earlier cores, `past`."""
        tiers = [_add(TierTotals, *pair) for pair in zip(self.tiers, past.tiers, strict=False)] or self.tiers
        accepted_at = tuple(map(sum, zip_longest(self.accepted_at, past.accepted_at, fillvalue=0)))
        return replace(_add(StepTotals, self, past), accepted_at=accepted_at, tiers=tuple(tiers))


_Stats = TypeVar("_Stats", StepStats, TierStats)


def _add(totals: type[StepTotals | TierTotals], now: _Stats, past: _Stats) -> _Stats:
    """Return `now` with the `totals` of `past` added."""
    return replace(now, **{name: getattr(now, name) + getattr(past, name) for name in totals.__struct_fields__})


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One sequence to continue. `token_ids` is the prompt as int32 bytes, never empty.

    - `params.n` is 1: choices are separate requests with the same `seed` and their own `choice`.
    - Times are seconds of the host's monotonic clock. If unfinished at `deadline_s`, the request is ended.
    - A lower `priority` is served earlier.
    - Cached prefixes are shared only between requests with the same `cache_salt`.
    - `http_id` is the id of the HTTP request in logs; "" if there is none.
    """

    request_id: str
    token_ids: bytes
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    cache_salt: str = ""
    http_id: str = ""

    @property
    def log_id(self) -> str:
        """Return the id of the request in logs."""
        return self.http_id or self.request_id


class EnginePrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt, and the (id, choice) of each request that continues it."""

    token_ids: bytes
    seed: int
    requests: list[tuple[str, int]]


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Requests whose common fields are sent once: `shared` is a request without prompt and name."""

    shared: EngineRequest
    prompts: list[EnginePrompt]

    @classmethod
    def pack(cls, requests: Iterable[EngineRequest]) -> list[AddRequests]:
        """Return one message for each run of requests that differ only in prompt, seed, id and choice."""
        return [cls(shared, _prompts(run)) for shared, run in groupby(requests, _shared)]

    def unpack(self) -> list[EngineRequest]:
        """Return the requests in order."""
        return [
            replace(self.shared, request_id=request_id, token_ids=prompt.token_ids, seed=prompt.seed, choice=choice)
            for prompt in self.prompts
            for request_id, choice in prompt.requests
        ]


def num_prompt_tokens(requests: Iterable[EngineRequest]) -> int:
    """Count the tokens of prompts; consecutive requests with the same prompt count once."""
    return sum(len(ids) // ID_BYTES for ids, _ in groupby(requests, attrgetter("token_ids")))


def _shared(request: EngineRequest) -> EngineRequest:
    return replace(request, request_id="", token_ids=b"", seed=0, choice=0)


def _prompts(requests: Iterable[EngineRequest]) -> list[EnginePrompt]:
    runs = groupby(requests, attrgetter("token_ids", "seed"))
    return [EnginePrompt(ids, seed, [(each.request_id, each.choice) for each in run]) for (ids, seed), run in runs]


class AbortRequests(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """Ends requests whose client has disconnected. Unknown ids are ignored."""

    request_ids: list[str]


class ClearCache(msgspec.Struct, frozen=True, array_like=True, tag="clear"):
    """Forgets cached blocks of some tiers."""

    tiers: tuple[Tier, ...]


class ShutdownCore(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """Ends all requests, then the core and its worker once stores to lower tiers are done."""


ToCore = AddRequests | AbortRequests | ClearCache | ShutdownCore


class Timeline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Times of a request's arrival, first step, first token and end, in seconds of the host's monotonic clock.

    Without output tokens, `first_token_s` is `finished_s`; if the request never started, `scheduled_s` is 0.
    `loads` alternates begins and ends of the first waits for KV loads.
    """

    arrival_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int = 0
    loads: tuple[float, ...] = ()


class RequestFault(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The reason of a failure: an HTTP status, a short code, one line for the user, and the field at fault, if any."""

    status: int
    code: str
    message: str
    param: str | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """New tokens of a request from one committed step. Only the last output of a request has a `finish_reason`.

    Only the output with the first token and the last output have a `timeline` up to then, and `cached_by_tier`: the
    number of cached tokens from each of `types.tier.TIERS`.

    `prompt_logprobs` are sent in separate outputs, in order of position, before the first token. `num_drafts` were
    verified in the step, and `num_accepted` of them are among the tokens.
    """

    request_id: str
    token_ids: bytes = b""
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    cached_by_tier: tuple[int, ...] = ()
    timeline: Timeline | None = None
    fault: RequestFault | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_drafts: int = 0
    num_accepted: int = 0


class CoreOutputs(msgspec.Struct, frozen=True, array_like=True, tag="outputs"):
    outputs: list[RequestOutput]
    stats: StepStats


class CoreProgress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Progress of a starting worker: `done` of `total` units of `phase`."""

    phase: str
    done: int
    total: int


class CoreReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A worker is ready. `num_blocks` is per KV group; `epoch` counts worker lives from 1.

    `kv_events`: the bound endpoints of KV events and of their replay, or None.
    """

    epoch: int
    worker_pid: int
    num_blocks: tuple[int, ...]
    load_s: float
    kv_events: tuple[str, str] | None = None


class CoreFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The replica has failed and will not recover."""

    message: str
    exit_code: int


FromCore = CoreOutputs | CoreProgress | CoreReady | CoreFailed
