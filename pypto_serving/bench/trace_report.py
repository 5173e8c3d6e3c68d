"""Render replays of a trace as a table and as plots: hit rate by tier and time to first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.report import new_figure, save_figure
from pypto_serving.bench.runner import Outcome
from pypto_serving.bench.traces import Trace, lru_hits
from pypto_serving.types.tier import TIERS

_COLORS = {"device": "tab:blue", "host": "tab:green", "disk": "tab:orange", "remote": "tab:red", "cache": "tab:blue"}

Values = np.ndarray[Any, Any]


def render_sweep(tier: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Render one line per size: hit rates by tier and of LRU caches (same size, infinite), and latencies."""
    tiers = [name for name in TIERS if any(name in r["hit_rate_by_tier"] for r in results)]
    shown = tiers if len(tiers) > 1 else []
    head = [f"{tier} tokens", "hit rate", *shown, "LRU", "infinite", "median TTFT s", "p99 TTFT s", "output tok/s"]
    rows = [head]
    for result in results:
        rates = [result["hit_rate"], *(result["hit_rate_by_tier"].get(name, 0.0) for name in shown)]
        rates += [result["lru_hit_rate"], result["infinite_hit_rate"]]
        ttfts = [_seconds(result[key]) for key in ("median_ttft_ms", "p99_ttft_ms")]
        size = format_tokens(result[f"{tier}_tokens"])
        rows.append([size, *(f"{rate:.1%}" for rate in rates), *ttfts, f"{result['output_throughput']:.0f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def format_tokens(count: int) -> str:
    """Format 4,000,000 as `4M` and 1,048,576 as `1048.576k`, without losing a digit."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size and count % (size // 1000) == 0:
            return f"{count / size:.10g}{unit}"
    return str(count)


def _seconds(value_ms: float | None) -> str:
    return "n/a" if value_ms is None else f"{value_ms / 1e3:.3g}"


def plot_sweep(tier: str, results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Plot hit rate by tier with both LRU bounds, and time to first token, over the size. Raises ConfigError."""
    figure = new_figure(8, 6)
    rates, ttfts = figure.subplots(2, 1, sharex=True)
    places = range(len(results))
    base = np.zeros(len(results))
    for name in TIERS:
        share = np.array([r["hit_rate_by_tier"].get(name, 0.0) for r in results]) * 100
        if share.any():
            rates.bar(places, share, 0.6, base, color=_COLORS[name], label=name)
            base += share
    rates.plot(places, [r["lru_hit_rate"] * 100 for r in results], "ko--", label="LRU cache of all tiers' size")
    rates.axhline(results[0]["infinite_hit_rate"] * 100, color="black", linewidth=0.8, label="infinite cache")
    rates.set_ylabel("prompt tokens from cache (%)")
    rates.legend(loc="upper left")
    for key, style in (("median_ttft_ms", "o-"), ("p99_ttft_ms", "s--")):
        ttfts.plot(places, [r[key] / 1e3 for r in results], style, label=key.split("_")[0])
    _log_seconds(ttfts)
    ttfts.set_xlabel(f"{tier} tier (tokens)")
    ttfts.set_xticks(places, [format_tokens(r[f"{tier}_tokens"]) for r in results])
    ttfts.legend()
    save_figure(figure, path)


def plot_run(trace: Trace, outcome: Outcome, path: Path) -> None:
    """Plot hit rate by tier and time to first token over the requests, by arrival. Raises ConfigError."""
    figure = new_figure(9, 6)
    rates, ttfts = figure.subplots(2, 1, sharex=True)
    arrivals_s = np.array([request.arrival_s for request in trace.requests])
    prompts = np.array([request.input_len for request in trace.requests])
    good = np.array([not record.error for record in outcome.records])
    windows = np.arange(len(prompts)) * _num_windows(len(prompts)) // len(prompts)
    starts_s = arrivals_s[np.flatnonzero(np.diff(windows, prepend=-1))]
    series = _cached(outcome.records)
    shares = [_share(windows, cached * good, prompts * good) for cached in series.values()]
    rates.stackplot(starts_s, shares, labels=list(series), colors=[_COLORS[name] for name in series], step="post")
    bound = _share(windows, np.array(lru_hits(trace, float("inf"), outcome.result.get("block_size", 1))), prompts)
    rates.step(starts_s, bound, "k", where="post", linewidth=0.8, label="infinite cache")
    rates.set_ylabel("prompt tokens from cache (%)")
    rates.legend(loc="upper left")
    ttfts.plot(arrivals_s[good], [r.ttft_s for r in outcome.records if not r.error], ".", markersize=3)
    _log_seconds(ttfts)
    ttfts.set_xlabel("arrival (s)")
    save_figure(figure, path)


def _num_windows(num_requests: int) -> int:
    """Return the number of windows: ten requests each, at most 60 windows."""
    return max(1, min(60, num_requests // 10))


def _log_seconds(axes: Any) -> None:
    from matplotlib.ticker import LogFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
    axes.set_ylabel("time to first token (s)")


def _cached(records: Sequence[RequestRecord]) -> dict[str, Values]:
    """Return the cached tokens of each record, by tier, for tiers with any."""
    tiers = [tier for tier in TIERS if any(record.cached_by_tier.get(tier) for record in records)]
    if not tiers:
        return {"cache": np.array([record.cached_tokens or 0 for record in records])}
    return {tier: np.array([record.cached_by_tier.get(tier, 0) for record in records]) for tier in tiers}


def _share(windows: Values, parts: Values, wholes: Values) -> Values:
    """Return the sum of `parts` in % of the sum of `wholes` for each window; 0 for empty windows."""
    part, whole = np.bincount(windows, parts), np.bincount(windows, wholes)
    return 100 * part / np.maximum(whole, 1)
