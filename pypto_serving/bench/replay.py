"""Replay a trace against a server or in virtual time, and report the results."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.bench.client import ApiClient, ModelCard
from pypto_serving.bench.datasets import Prompt
from pypto_serving.bench.metrics import RequestRecord, summarize, summarize_cache
from pypto_serving.bench.options import Reporting, Target, require_int
from pypto_serving.bench.report import timestamp
from pypto_serving.bench.runner import Advance, Outcome, measure
from pypto_serving.bench.simulator import Machine, Simulator
from pypto_serving.bench.traces import Trace, load_trace, lru_hits
from pypto_serving.errors import ConfigError
from pypto_serving.util import counted, parse_size

_REPORTING = Reporting(percentiles=(90.0, 99.0))
SWEPT = ("device", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The trace to replay, its part, scale and speedup, and the `seed` of its token ids."""

    path: Path
    scale: Fraction = Fraction(1)
    requests: int | None = None
    duration_s: float | None = None
    speedup: float = 1.0
    seed: int = 0

    def load(self) -> Trace:
        """Load the trace, cut and scaled. Raises ConfigError."""
        require_int("--seed", self.seed, 0)
        return load_trace(self.path).head(self.requests, self.duration_s).scaled(self.scale).faster(self.speedup)

    def settings(self, trace: Trace) -> dict[str, Any]:
        """Return the settings of the replay, for the result."""
        count, last_s = len(trace.requests), trace.requests[-1].arrival_s
        return {
            "date": timestamp(),
            "trace": self.path.name,
            "scale": str(self.scale),
            "speedup": self.speedup,
            "seed": self.seed,
            "trace_block_size": trace.block_size,
            "num_prompts": count,
            "request_rate": count / last_s if last_s else "inf",
            "max_concurrency": None,
        }


async def replay(
    source: Source,
    trace: Trace,
    target: Target,
    card: ModelCard,
    vocab_size: int | None,
    advance: Advance = lambda: None,
) -> Outcome:
    """Send the requests of `trace` to the model of `card` at the trace's times, even if earlier ones are unfinished.

    Raises ConfigError before the first request if the size of the vocabulary is not known.
    """
    vocab_size = _vocabulary(card, vocab_size)
    client = ApiClient(replace(target, ignore_eos=True), card.id)
    arrivals_s = np.array([request.arrival_s for request in trace.requests])
    try:
        requests = _encoded(client, trace, source.seed, vocab_size)
        records, duration_s, load = await measure(client.send, requests, arrivals_s, None, advance)
    finally:
        client.close()
    result = source.settings(trace) | {"backend": target.backend, "model_id": card.id}
    result |= _summary(trace, records, duration_s, 1) | load.to_result()
    warnings = filter(None, [load.warning(), _miss_warning(source, trace, result)])
    return Outcome(records, result, list(warnings))


def _encoded(client: ApiClient, trace: Trace, seed: int, vocab_size: int) -> Iterator[tuple[bytes, int]]:
    """Yield encoded requests one by one, since all of them may be larger than memory."""
    for request in trace.requests:
        ids = trace.token_ids(request, seed, vocab_size).tolist()
        yield client.encode(Prompt(ids, request.input_len, request.output_len)), request.input_len


def _vocabulary(card: ModelCard, given: int | None) -> int:
    if given is not None:
        require_int("--vocab-size", given, 1)
        return given
    if card.vocab_size is None:
        raise ConfigError("the server does not report the size of its vocabulary: give --vocab-size N")
    return card.vocab_size


def fit_window(source: Source, trace: Trace, card: ModelCard) -> tuple[Trace, str]:
    """Drop requests longer than the server's window, and return a warning; raise ConfigError if none is left."""
    window = card.max_model_len
    if window is None or trace.longest <= window:
        return trace, ""
    kept = tuple(request for request in trace.requests if request.num_tokens <= window)
    found = f"{len(trace.requests) - len(kept)} of {counted(len(trace.requests), 'request')}"
    too_long = f"longer than the server's window of {window} tokens"
    if not kept:
        scale = _fitting(source.scale, trace, window)
        raise ConfigError(
            f"{found} are {too_long}, the longest has {trace.longest}: give --scale {scale}, or a server with a larger "
            "max-model-len"
        )
    return replace(trace, requests=kept), f"{found} are left out: {too_long}"


def _fitting(scale: Fraction, trace: Trace, window: int) -> Fraction:
    """Return the largest half, quarter, ... of `scale` at which the longest request fits the window."""
    longest = trace.longest / scale
    while longest * scale > window:
        scale /= 2
    return scale


def _miss_warning(source: Source, trace: Trace, result: dict[str, Any]) -> str:
    """Return a warning, or "", that nothing came from the cache although prompts of the trace repeat."""
    if result["hit_rate"] != 0 or not result["infinite_hit_rate"]:
        return ""
    return (
        f"nothing came from the KV cache, though {result['infinite_hit_rate']:.1%} of the prompts repeat: a server "
        f"finds no prefix shorter than its block, and at --scale {source.scale} a block of the trace has "
        f"{counted(trace.block_size, 'token')}; give a larger --scale, or a server with a smaller block-size"
    )


def simulate(source: Source, trace: Trace, machine: Machine, advance: Advance = lambda: None) -> Outcome:
    """Serve `trace` in virtual time. Raises ConfigError if the machine is too small for it."""
    start_s = time.perf_counter()
    simulated = Simulator(trace, machine, source.seed).run(advance)
    times = {f"{name}_seconds": getattr(machine, f"{name}_s") for name in ("step", "token", "row")}
    sizes = {name: value for name, value in asdict(machine).items() if not name.endswith("_s")}
    result = source.settings(trace) | {"backend": "virtual", "model_id": None, **sizes, **times}
    result |= _summary(trace, simulated.records, simulated.duration_s, machine.block_size)
    hits = lru_hits(trace, machine.num_tokens, machine.block_size)
    result |= {
        "lru_hit_rate": sum(hits) / trace.prompt_tokens,
        "num_steps": simulated.num_steps,
        "num_preemptions": simulated.num_preemptions,
        "real_duration": time.perf_counter() - start_s,
    }
    return Outcome(simulated.records, result, [])


def _summary(trace: Trace, records: Sequence[RequestRecord], duration_s: float, block_size: int) -> dict[str, Any]:
    bound = lru_hits(trace, float("inf"), block_size)
    result = summarize(records, duration_s, _REPORTING) | summarize_cache(records)
    return result | {"infinite_hit_rate": sum(bound) / trace.prompt_tokens}


def parse_sweep(text: str) -> tuple[str, tuple[int, ...]]:
    """Parse `device=1M,4M,16M` to a tier and its sizes to try in turn, in tokens. Raises ConfigError."""
    tier, equals, sizes = text.partition("=")
    if tier not in SWEPT or not equals:
        raise ConfigError(f"--sweep must be TIER=SIZE,SIZE,... with a tier of {', '.join(SWEPT)}; got {text!r}")
    return tier, tuple(parse_tokens("--sweep", size) for size in sizes.split(","))


def parse_tokens(option: str, text: str) -> int:
    """Parse `1000000`, `1M` or `1Mi` to a number of tokens. Raises ConfigError."""
    try:
        return parse_size(text)
    except ValueError:
        raise ConfigError(f"{option} must be a number of tokens such as 500000, 4M or 1Mi; got {text!r}") from None


def run_sweep(
    source: Source, trace: Trace, machine: Machine, tier: str, sizes: Sequence[int], advance: Advance = lambda: None
) -> list[Outcome]:
    """Run one simulation for each size of a tier; other tiers keep theirs. Check all machines before the first run."""
    machines = [replace(machine, **{f"{tier}_tokens": size}) for size in sizes]
    for each in machines:
        each.engine_config(trace.longest)
    return [simulate(source, trace, each, advance) for each in machines]
