"""Compute statistics over request records, by the definitions and key names of `vllm bench serve`.

    send         first content      content        last content or finish chunk
     |---- TTFT ----|---- ITL ----|---- ITL ----|
     |-------------------- E2EL -----------------|        TPOT = (E2EL - TTFT) / (output tokens - 1)

Latencies come from successful requests only. A latency without any value (no request succeeded, or none has a second
token) is None, not 0.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pypto_serving.bench.options import Metric, Reporting
from pypto_serving.types.tier import TIERS

DraftCounters = Counter[str | int]
"""A server's counters of drafts: totals by name, and accepted drafts by position."""
_DRAFTS = "num_drafts", "num_draft_tokens", "num_accepted_tokens"
_DRAFT_LINE = re.compile(
    rf"vllm:spec_decode_({'|'.join(_DRAFTS)}|num_accepted_tokens_per_pos)(?:_total)?"
    r"""\{(?:[^}]*,)?(?:position="(\d+)")?[^}]*\} (\S+)"""
)


@dataclass(slots=True)
class RequestRecord:
    """The client's measurements of one request, in seconds. It failed exactly if `error` is not empty.

    `ttft_s` is None for a reply that was not streamed. If the server does not report cached tokens, `cached_tokens` is
    None and `cached_by_tier` is empty.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    start_s: float = 0.0
    ttft_s: float | None = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""
    cached_tokens: int | None = None
    cached_by_tier: dict[str, int] = field(default_factory=dict)

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first. None for a single token, and for a reply that was not streamed."""
        if self.output_tokens < 2 or self.ttft_s is None:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


def summarize(records: Sequence[RequestRecord], duration_s: float, reporting: Reporting) -> dict[str, Any]:
    """Return counts, throughputs and latency statistics of a run of `duration_s` seconds."""
    good = [r for r in records if not r.error]
    total_input = sum(r.prompt_tokens for r in good)
    total_output = sum(r.output_tokens for r in good)
    peak = peak_output_tokens_per_s(good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(records) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / duration_s,
        "request_goodput": None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        # In a run that does not fill its last second, no second has as many tokens as the mean.
        "max_output_tokens_per_s": None if peak is None else max(peak, total_output / duration_s),
        "max_concurrent_requests": peak_concurrency(good),
    }
    if reporting.goodput_ms:
        result["request_goodput"] = sum(meets_goals(r, reporting.goodput_ms) for r in good) / duration_s
    for metric in reporting.metrics:
        result |= statistics_ms(metric, _values_s(metric, good), reporting.percentiles)
    return result


def summarize_cache(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the cached prompt tokens and their share of all prompt tokens, in total and, if known, by tier."""
    good = [r for r in records if not r.error]
    prompt_tokens = sum(r.prompt_tokens for r in good)
    known = [r.cached_tokens for r in good if r.cached_tokens is not None]
    tiers = [tier for tier in TIERS if any(tier in r.cached_by_tier for r in good)]
    by_tier = {tier: sum(r.cached_by_tier.get(tier, 0) for r in good) for tier in tiers}
    return {
        "total_cached_tokens": sum(known) if known else None,
        "hit_rate": sum(known) / prompt_tokens if known else None,
        "cached_tokens_by_tier": by_tier,
        "hit_rate_by_tier": {tier: tokens / prompt_tokens for tier, tokens in by_tier.items()},
    }


def parse_draft_counters(metrics: str) -> DraftCounters | None:
    """Return the counters of drafts in the text of /metrics, over all engines; None if it has none."""
    found: DraftCounters = Counter()
    for line in metrics.splitlines():
        if match := _DRAFT_LINE.match(line):
            found[match[1] if match[2] is None else int(match[2])] += int(float(match[3]))
    return found if _DRAFTS[0] in found else None


def summarize_drafts(before: DraftCounters | None, after: DraftCounters | None) -> dict[str, Any]:
    """Return statistics of the drafts between two readings; {} for a server without drafts."""
    if before is None or after is None:
        return {}
    rounds, drafted, accepted = (after[name] - before[name] for name in _DRAFTS)
    positions = sorted(key for key in after if isinstance(key, int))
    rates = [(after[at] - before[at]) / rounds if rounds else None for at in positions]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / rounds if rounds else None,
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": rates,
    }


def details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return the per-request lists of a detailed result, in the order of the prompts, in seconds."""
    return {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens for r in records],
        "start_times": [r.start_s for r in records],
        "ttfts": [r.ttft_s for r in records],
        "itls": [r.itls_s for r in records],
        "latencies": [r.latency_s for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def statistics_ms(metric: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, population standard deviation and linearly interpolated percentiles in milliseconds."""
    keys = [f"{name}_{metric}_ms" for name in ("mean", "median", "std", *map(_percentile_name, percentiles))]
    if not values_s:
        return dict.fromkeys(keys)
    values = np.asarray(values_s) * 1e3
    numbers = [values.mean(), np.median(values), values.std(), *np.percentile(values, percentiles)]
    return {key: float(number) for key, number in zip(keys, numbers, strict=True)}


def meets_goals(record: RequestRecord, goodput_ms: Mapping[str, float]) -> bool:
    """Return whether a request met every limit. One output token has no TPOT and meets every TPOT limit."""
    seen_s = {"ttft": record.ttft_s or 0.0, "tpot": record.tpot_s or 0.0, "e2el": record.latency_s}
    return all(seen_s[metric] * 1e3 <= limit_ms for metric, limit_ms in goodput_ms.items())


def peak_output_tokens_per_s(records: Sequence[RequestRecord]) -> float | None:
    """Return the most output tokens in any second. A request's tokens are spread evenly over its chunks.

    None if replies were not streamed, since the arrival times of tokens are unknown then.
    """
    if not records:
        return 0.0
    if any(r.ttft_s is None for r in records):
        return None
    origin_s = min(r.start_s for r in records)
    buckets: dict[int, float] = {}
    for record in records:
        weight = record.output_tokens / (len(record.itls_s) + 1)
        arrivals_s = record.start_s - origin_s + np.cumsum([record.ttft_s or 0.0, *record.itls_s])
        for second in arrivals_s.astype(int).tolist():
            buckets[second] = buckets.get(second, 0.0) + weight
    return max(buckets.values())


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """Return the largest number of intervals [start, start + latency) that overlap."""
    events = sorted([(r.start_s, 1) for r in records] + [(r.start_s + r.latency_s, -1) for r in records])
    running = peak = 0
    for _, change in events:
        running += change
        peak = max(peak, running)
    return peak


def _percentile_name(percentile: float) -> str:
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def _values_s(metric: Metric, records: Sequence[RequestRecord]) -> list[float]:
    if metric == "itl":
        return [gap_s for r in records for gap_s in r.itls_s]
    values = (getattr(r, {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "latency_s"}[metric]) for r in records)
    return [value for value in values if value is not None]
