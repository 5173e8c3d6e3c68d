"""Run a benchmark: make the prompts, send them at their arrival times, watch the client's load, and report."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.bench.client import ApiClient, ModelCard, find_model, read_draft_counters
from pypto_serving.bench.datasets import Dataset, Prompt, PromptVocabulary, as_completion, as_messages
from pypto_serving.bench.metrics import RequestRecord, summarize, summarize_drafts
from pypto_serving.bench.options import LoadName, Reporting, Target, Traffic
from pypto_serving.bench.report import settings
from pypto_serving.errors import ConfigError

_SCHEDSTAT = Path("/proc/thread-self/schedstat")
_LAG_PERIOD_S = 0.02
_BUSY_SHARE = 0.8
_BUSY_LAG_MS = 10.0


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The options of one run."""

    target: Target
    traffic: Traffic
    dataset: Dataset
    reporting: Reporting
    tokenizer: Path | None = None
    vocab_size: int | None = None


@dataclass
class ClientLoad:
    """The client's own load during the measurement: shares of the time, and delays of its event loop.

    `wait_share`: share of the time in which its thread was runnable but had no core.
    """

    cpu_share: float = 0.0
    wait_share: float = 0.0
    lags_s: list[float] = field(default_factory=list)

    @property
    def mean_lag_ms(self) -> float:
        return float(np.mean(self.lags_s)) * 1e3 if self.lags_s else 0.0

    def to_result(self) -> dict[str, float]:
        return {
            "client_cpu_share": self.cpu_share,
            "client_wait_share": self.wait_share,
            "client_mean_lag_ms": self.mean_lag_ms,
        }

    def warning(self) -> str | None:
        """Return a warning if the client was too busy for valid results, else None."""
        if self.cpu_share + self.wait_share < _BUSY_SHARE and self.mean_lag_ms < _BUSY_LAG_MS:
            return None
        return (
            f"the client is the bottleneck: it ran {self.cpu_share:.0%} and waited for a core "
            f"{self.wait_share:.0%} of the time, and handled events {self.mean_lag_ms:.1f} ms late on average; "
            "lower the load, or run it on another machine"
        )


@dataclass(frozen=True)
class Outcome:
    """The records in prompt order, the result with vLLM's keys, and warnings for the user."""

    records: Sequence[RequestRecord]
    result: dict[str, Any]
    warnings: Sequence[str]


Send = Callable[[bytes, int | None], Awaitable[RequestRecord]]
"""Sends an encoded request, given its number of prompt tokens or None."""
Advance = Callable[[], None]
"""Called once per finished request."""


async def run(benchmark: Benchmark, advance: Advance = lambda: None) -> Outcome:
    """Warm up, send every prompt, and summarize. Raises ConfigError or BenchmarkError before the first request."""
    target, traffic = benchmark.target, benchmark.traffic
    card, vocabulary = await _resolve(benchmark)
    prompts = _prompts(benchmark, vocabulary)
    client = ApiClient(replace(target, ignore_eos=target.ignore_eos or benchmark.dataset.synthetic), card.id)
    try:
        requests = [(client.encode(prompt), prompt.input_len) for prompt in prompts]
        measured, extra = requests[: traffic.num_prompts], requests[traffic.num_prompts :]
        warm = await send_all(client.send, extra, np.zeros(len(extra)), traffic.max_concurrency)
        before = await read_draft_counters(target)
        records, duration_s, load = await measure(
            client.send, measured, arrival_times_s(traffic), traffic.max_concurrency, advance
        )
        drafts = summarize_drafts(before, await read_draft_counters(target))
    finally:
        client.close()
    result = settings(target, traffic, card.id, str(benchmark.tokenizer) if benchmark.tokenizer else None)
    result |= summarize(records, duration_s, benchmark.reporting)
    result |= drafts | load.to_result()
    return Outcome(records, result, [*_warm_up_warnings(warm), *filter(None, [load.warning()])])


async def sweep(benchmark: Benchmark, name: LoadName, loads: Sequence[float], advance: Advance) -> list[dict[str, Any]]:
    """Run the benchmark at each load, with other prompts each time; return the results.

    `name` is the field of Traffic that is set to each load.
    """
    results = []
    for i, load in enumerate(loads):
        changes: dict[str, Any] = {name: load, "seed": benchmark.traffic.seed + i}
        at_load = replace(benchmark, traffic=replace(benchmark.traffic, **changes))
        results.append((await run(at_load, advance)).result)
    return results


def arrival_times_s(traffic: Traffic) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the arrival time of each request, in seconds after the start, ascending.

    Gaps are gamma distributed with shape `burstiness` (1: a Poisson process) and mean 1 / rate. At a constant
    rate they are scaled so that the last request arrives at num_prompts / rate whatever the seed.
    """
    count, ramp_up = traffic.num_prompts, traffic.ramp_up
    rates = np.full(count, traffic.request_rate)
    if ramp_up is not None:
        rates = np.array([ramp_up.rate(progress) for progress in np.linspace(0, 1, count)])
    shape = traffic.burstiness
    gaps = np.random.default_rng(traffic.seed).gamma(shape, 1 / shape, size=count) / rates
    times = np.cumsum(gaps)
    if ramp_up is None and times[-1] > 0:
        times *= count / traffic.request_rate / times[-1]
    return times


async def measure(
    send: Send,
    requests: Iterable[tuple[bytes, int | None]],
    arrivals_s: np.ndarray[Any, np.dtype[np.float64]],
    max_concurrency: int | None,
    advance: Advance,
) -> tuple[list[RequestRecord], float, ClientLoad]:
    """Run `send_all`. Return the records, the seconds until the last one, and the client's load."""
    start_s = time.perf_counter()
    async with watch_client() as load:
        records = await send_all(send, requests, arrivals_s, max_concurrency, advance)
        duration_s = time.perf_counter() - start_s
    return records, duration_s, load


async def send_all(
    send: Send,
    requests: Iterable[tuple[bytes, int | None]],
    arrivals_s: np.ndarray[Any, np.dtype[np.float64]],
    max_concurrency: int | None,
    advance: Advance = lambda: None,
) -> list[RequestRecord]:
    """Send each request at its arrival time, or later when fewer than `max_concurrency` are in flight.

    Return records in order. Each request is encoded before its arrival time, so encoding delays nothing.
    """
    slots = contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(request: bytes, prompt_tokens: int | None) -> RequestRecord:
        async with slots:
            record = await send(request, prompt_tokens)
        advance()
        return record

    start_s = time.perf_counter()
    tasks = []
    async with asyncio.TaskGroup() as group:
        for request, arrival_s in zip(requests, arrivals_s.tolist(), strict=True):
            if (wait_s := start_s + arrival_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            tasks.append(group.create_task(one(*request)))
    return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def watch_client() -> AsyncIterator[ClientLoad]:
    """Measure the client's load while the body runs. The load is complete after the body."""
    load = ClientLoad()
    watcher = asyncio.create_task(_record_lags(load.lags_s))
    wall_s, cpu_s, wait_s = time.perf_counter(), time.process_time(), _core_wait_s()
    try:
        yield load
    finally:
        watcher.cancel()
        duration_s = time.perf_counter() - wall_s
        load.cpu_share = (time.process_time() - cpu_s) / duration_s
        load.wait_share = (_core_wait_s() - wait_s) / duration_s


def _core_wait_s() -> float:
    """Return the seconds in which this thread was runnable without a core; 0 if the kernel does not report them."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


async def _record_lags(lags_s: list[float]) -> None:
    while True:
        due_s = time.perf_counter() + _LAG_PERIOD_S
        await asyncio.sleep(_LAG_PERIOD_S)
        lags_s.append(max(0.0, time.perf_counter() - due_s))


async def _resolve(benchmark: Benchmark) -> tuple[ModelCard, PromptVocabulary | None]:
    """Return the model's name and the vocabulary. Ask the server only for values that the options lack."""
    target = benchmark.target
    vocabulary = None
    if benchmark.tokenizer is not None:
        vocabulary = PromptVocabulary.of_tokenizer(benchmark.tokenizer)
    elif benchmark.vocab_size is not None:
        vocabulary = PromptVocabulary.of_size(benchmark.vocab_size)
    needs_vocabulary = benchmark.dataset.synthetic and vocabulary is None
    if target.model is not None and not needs_vocabulary:
        return ModelCard(target.model), vocabulary
    card = await find_model(target)
    if needs_vocabulary and card.vocab_size is None:
        raise ConfigError(
            "random prompts need a vocabulary, and the server does not report its size: "
            "give --tokenizer DIR or --vocab-size N"
        )
    return card, PromptVocabulary.of_size(card.vocab_size) if needs_vocabulary and card.vocab_size else vocabulary


def _prompts(benchmark: Benchmark, vocabulary: PromptVocabulary | None) -> list[Prompt]:
    """Return the measured prompts, then the warm-up's: from the same data set, but not the same prompts."""
    traffic = benchmark.traffic
    prompts = benchmark.dataset.prompts(traffic.num_prompts + traffic.num_warmups, traffic.seed, vocabulary)
    if benchmark.target.backend == "openai":
        return [as_completion(prompt) for prompt in prompts]
    tokenizer = vocabulary.tokenizer if vocabulary else None
    return [as_messages(prompt, tokenizer) for prompt in prompts]


def _warm_up_warnings(records: Sequence[RequestRecord]) -> list[str]:
    errors = [r.error for r in records if r.error]
    return [f"{len(errors)} of {len(records)} warm-up requests failed: {errors[0]}"] if errors else []
