"""Simulate in virtual time: the real scheduler and KV manager serve a trace on a modelled machine.

There is no worker, no backend and no KV. `Machine` gives the time of a step, `VirtualTransfers` the time of a transfer
between tiers. Sampled tokens are unique to request and position, so no other request can hit an output in the cache.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import require_int, require_positive
from pypto_serving.bench.runner import Advance
from pypto_serving.bench.traces import Trace, TraceRequest
from pypto_serving.errors import ConfigError
from pypto_serving.kv.manager import KVCacheManager
from pypto_serving.sched.scheduler import Scheduler
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.config import CacheConfig, EngineConfig, ModelConfig, WorkerConfig, default_of
from pypto_serving.types.kv import FullSpec, KVCacheGroupSpec, KVTensorSpec
from pypto_serving.types.request import EngineRequest, RequestOutput
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendLimits, StepPlan, StepResult
from pypto_serving.types.tier import TIERS, Tier, TierConfig, TransferDone, TransferJob, TransferKind
from pypto_serving.util import ceil_div

PROMPT_VOCABULARY = 150_000
"""Prompt tokens have ids below this, output tokens have ids from it on."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A replica to simulate: the tokens that each tier holds (0: no such tier), limits of the scheduler, and speed.

    A step of n tokens in r rows takes `step_s + n * token_s + r * row_s` seconds. The defaults are the line through two
    steps of Qwen3-0.6B in docs/benchmarks.md, 24 ms for one token and 1,484 ms for 512; it gives 44 ms for 8 rows (44
    measured) and 112 ms for 32 (124 measured).
    """

    block_size: int
    device_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    max_num_seqs: int = default_of(BackendLimits, "max_num_seqs")
    max_num_batched_tokens: int = default_of(BackendLimits, "max_num_batched_tokens")
    step_s: float = 0.021
    token_s: float = 0.00286
    row_s: float = 0.0

    def __post_init__(self) -> None:
        require_int("--block-size", self.block_size, 1)
        require_int("--device-tokens", self.device_tokens, self.block_size)
        require_int("--host-tokens", self.host_tokens, self.block_size if self.host_tokens > 0 else 0)
        require_int("--disk-tokens", self.disk_tokens, self.block_size if self.disk_tokens > 0 else 0)
        require_int("--max-num-seqs", self.max_num_seqs, 1)
        require_int("--max-num-batched-tokens", self.max_num_batched_tokens, 2)
        require_positive("--step-seconds", self.step_s)
        for option, value in (("--token-seconds", self.token_s), ("--row-seconds", self.row_s)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{option} must be a finite number, 0 or above, got {value}")

    def elapsed_s(self, num_tokens: int, num_rows: int) -> float:
        """Return the time of a step."""
        return self.step_s + num_tokens * self.token_s + num_rows * self.row_s

    @property
    def num_tokens(self) -> int:
        """Number of tokens that all tiers hold."""
        return self.device_tokens + self.host_tokens + self.disk_tokens

    @property
    def group(self) -> KVCacheGroupSpec:
        """A KV group of full history with the bytes of Qwen3-0.6B in bfloat16: 112 KiB per token."""
        rows = KVTensorSpec(name="kv", layers=tuple(range(28)), dtype="bfloat16", row_shape=(2 * 8 * 128,))
        return FullSpec(name="kv", tensors=(rows,), block_size=self.block_size)

    @property
    def tiers(self) -> tuple[TierConfig, ...]:
        """Tiers below the device."""
        sizes: tuple[tuple[Tier, int], ...] = (("host", self.host_tokens), ("disk", self.disk_tokens))
        slots = [(tier, size // self.block_size) for tier, size in sizes if size]
        block_bytes = self.group.block_bytes
        return tuple(TierConfig(tier=tier, size_bytes=n * block_bytes, num_slots=(n,)) for tier, n in slots)

    def engine_config(self, max_model_len: int) -> EngineConfig:
        """Return the configuration for requests of up to `max_model_len` tokens.

        Raises ConfigError if the device cannot hold one request and, with lower tiers, one more block for transfers.
        """
        needed = ceil_div(max_model_len, self.block_size) + bool(self.tiers)
        num_blocks = self.device_tokens // self.block_size
        if needed > num_blocks:
            raise ConfigError(
                f"--device-tokens {self.device_tokens}: the longest request has {max_model_len} tokens; "
                f"give at least {needed * self.block_size}"
            )
        return EngineConfig(
            model=ModelConfig(path="", dtype="bfloat16", vocab_size=PROMPT_VOCABULARY),
            limits=BackendLimits(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=max_model_len,
            ),
            cache=CacheConfig(groups=(self.group,), num_blocks=(num_blocks + 1,), tiers=self.tiers),
            worker=WorkerConfig(backend=""),
        )


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """The result of a simulation: records in the order of the trace. `duration_s` is virtual."""

    records: list[RequestRecord]
    duration_s: float
    num_steps: int
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class TierSpeed:
    """The speed of a tier: a job of n bytes takes `latency_s + n / bytes_per_s` seconds, in either direction."""

    latency_s: float
    bytes_per_s: float


SPEEDS: Mapping[Tier, TierSpeed] = {
    "host": TierSpeed(latency_s=20e-6, bytes_per_s=20e9),
    "disk": TierSpeed(latency_s=100e-6, bytes_per_s=3e9),
    "remote": TierSpeed(latency_s=1e-3, bytes_per_s=1e9),
}
"""Round figures, not measured: host memory over PCIe 4, one NVMe disk, a 10 Gbit/s network."""


class VirtualTransfers:
    """Owns the running transfers. Each tier does one job at a time per kind, in order of submission.

    Loads, stores and finds of one tier do not wait for each other. A job moves all of its pieces. Only this
    engine writes to a tier in virtual time, so a `find` finds nothing and takes only the latency.
    """

    def __init__(self, speeds: Mapping[Tier, TierSpeed] = SPEEDS) -> None:
        self._speeds = speeds
        self._free_s: dict[tuple[Tier, TransferKind], float] = {}
        self._pending: list[tuple[float, int, TransferDone]] = []
        self._num_submitted = 0

    def submit(self, job: TransferJob, num_bytes: int, now_s: float) -> None:
        """Queue a job of `num_bytes` in total. Raises KeyError for a tier without a speed."""
        speed, lane = self._speeds[job.tier], (job.tier, job.kind)
        moved = 0 if job.kind == "find" else num_bytes
        elapsed_s = speed.latency_s + moved / speed.bytes_per_s
        end_s = max(now_s, self._free_s.get(lane, 0.0)) + elapsed_s
        self._free_s[lane] = end_s
        flags = (b"\0" if job.kind == "find" else b"\1") * (len(unpack_ids(job.groups)))
        self._num_submitted += 1
        done = TransferDone(job.job_id, flags, elapsed_s)
        heapq.heappush(self._pending, (end_s, self._num_submitted, done))

    def due(self, now_s: float) -> list[TransferDone]:
        """Remove and return the jobs that have ended by `now_s`, in order of their end."""
        ended = []
        while self._pending and self._pending[0][0] <= now_s:
            ended.append(heapq.heappop(self._pending)[2])
        return ended

    @property
    def next_s(self) -> float:
        """Return when the next job ends; infinite if none is running."""
        return self._pending[0][0] if self._pending else math.inf


class VirtualWorker:
    """A simulated worker. Owns the state of rows that plans do not carry, and invents tokens.

    A request's tokens are `seed`, `seed + 1`, ...; the caller gives each request a range of its own.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._missing: NDArray[np.int64] = np.zeros(machine.max_num_seqs, np.int64)
        self._next_token: NDArray[np.int64] = np.zeros(machine.max_num_seqs, np.int64)

    def run(self, plan: StepPlan) -> StepResult:
        """Execute a plan. A row samples when the step computes its last known token."""
        for new in plan.new_rows:
            num_tokens = len(new.token_ids) // 4
            self._missing[new.row] = num_tokens - new.num_computed
            self._next_token[new.row] = new.sampling.seed + num_tokens - new.prompt_len
        rows, counts = unpack_ids(plan.rows), unpack_ids(plan.num_tokens)
        self._missing[rows] -= counts
        sampling = rows[self._missing[rows] == 0]
        tokens = self._next_token[sampling]
        self._next_token[sampling] += 1
        self._missing[sampling] += 1
        return StepResult(
            step_id=plan.step_id,
            epoch=plan.epoch,
            rows=pack_ids(sampling),
            token_ids=pack_ids(tokens),
            logprobs=[],
            elapsed_s=self._machine.elapsed_s(int(counts.sum()), len(rows)),
        )


class Simulator:
    """Owns one replica in virtual time. `run` serves the trace once, with requests at the trace's times."""

    def __init__(self, trace: Trace, machine: Machine, seed: int = 0) -> None:
        config = machine.engine_config(trace.longest)
        self._trace = trace
        self._seed = seed
        kv = KVCacheManager(
            config.cache.groups,
            config.cache.num_blocks,
            tiers=config.cache.tiers,
            store_policy=config.cache.kv_store,
            longest_blocks=config.longest_blocks,
        )
        self._scheduler = Scheduler(config, kv)
        self._transfers = VirtualTransfers()
        self._block_bytes = machine.group.block_bytes
        self._tiers: tuple[Tier, ...] = ("device", *(tier.tier for tier in config.cache.tiers))
        self._worker = VirtualWorker(machine)
        self._records: list[RequestRecord] = []
        self._next_token = PROMPT_VOCABULARY
        self._now_s = 0.0

    def run(self, advance: Advance = lambda: None) -> Simulated:
        """Serve the trace. Call `advance` once per finished request."""
        while len(self._records) < len(self._trace.requests) or self._scheduler.has_work:
            self._take_arrivals()
            self._scheduler.begin_turn(self._now_s)
            plan = self._scheduler.plan(self._now_s)
            self._begin_transfers()
            if plan is None:
                self._move_to(self._next_event_s())
                continue
            result = self._worker.run(plan)
            self._move_to(self._now_s + result.elapsed_s)
            for output in self._scheduler.commit(result, self._now_s):
                self._take_output(output)
                if output.finish_reason:
                    advance()
        self._scheduler.check()
        counters = self._scheduler.counters
        return Simulated(
            records=self._records,
            duration_s=self._now_s,
            num_steps=counters.num_steps,
            num_preemptions=counters.num_preemptions,
        )

    def _next_event_s(self) -> float:
        """Return the time of the next event that an idle scheduler waits for: an arrival or the end of a transfer."""
        requests, arrived = self._trace.requests, len(self._records)
        event_s = min(self._transfers.next_s, requests[arrived].arrival_s if arrived < len(requests) else math.inf)
        assert event_s < math.inf, "the scheduler runs nothing, and nothing will change that"
        return event_s

    def _move_to(self, end_s: float) -> None:
        """Advance the time. Handle transfers that end meanwhile at once; they may start others."""
        while self._transfers.next_s <= end_s:
            self._now_s = self._transfers.next_s
            self._scheduler.transferred(self._transfers.due(self._now_s), self._now_s)
            self._scheduler.begin_turn(self._now_s)
            self._begin_transfers()
        self._now_s = end_s

    def _begin_transfers(self) -> None:
        """Start due transfers. With one step at a time, no load waits for an earlier step."""
        transfers = self._scheduler.take_transfers(self._now_s)
        for job in transfers.jobs if transfers else ():
            num_blocks = len(unpack_ids(job.blocks))
            self._transfers.submit(job, num_blocks * self._block_bytes, self._now_s)

    def _take_arrivals(self) -> None:
        """Add the requests that have arrived by now. Make their prompts only here, to save memory."""
        requests = self._trace.requests
        while len(self._records) < len(requests):
            request = requests[len(self._records)]
            if request.arrival_s > self._now_s:
                return
            self._add(request)

    def _add(self, request: TraceRequest) -> None:
        refused = self._scheduler.add(
            EngineRequest(
                request_id=str(len(self._records)),
                token_ids=pack_ids(self._trace.token_ids(request, self._seed, PROMPT_VOCABULARY)),
                params=SamplingParams(temperature=0.0, max_tokens=request.output_len, ignore_eos=True),
                seed=self._next_token,
                arrival_s=request.arrival_s,
            )
        )
        assert refused is None, refused
        self._next_token += request.output_len
        self._records.append(RequestRecord(prompt_tokens=request.input_len, start_s=request.arrival_s))

    def _take_output(self, output: RequestOutput) -> None:
        """Record an output. Each has one token; the last one has the numbers of cached tokens."""
        record = self._records[int(output.request_id)]
        latency_s = self._now_s - record.start_s
        if record.output_tokens:
            record.itls_s.append(latency_s - record.latency_s)
        else:
            record.ttft_s = latency_s
        record.latency_s = latency_s
        record.output_tokens += 1
        if output.finish_reason:
            tokens = dict(zip(TIERS, output.cached_by_tier, strict=True))
            record.cached_tokens = output.num_cached_tokens
            record.cached_by_tier = {tier: tokens[tier] for tier in self._tiers}
