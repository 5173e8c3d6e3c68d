"""Draw results: a comparison of two, a server at several loads, replays of a trace. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import LoadName
from pypto_serving.bench.report import LOAD_COLUMNS, change_of, comparable, format_tokens, is_better
from pypto_serving.bench.runner import Outcome
from pypto_serving.bench.traces import Trace, lru_hits
from pypto_serving.errors import ConfigError
from pypto_serving.types.tier import TIERS
from pypto_serving.util import install_extra

_COLORS = {"device": "tab:blue", "host": "tab:green", "disk": "tab:orange", "remote": "tab:red", "cache": "tab:blue"}

Values = np.ndarray[Any, Any]


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure, sizes in inches. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"--plot needs matplotlib; {install_extra('bench')}") from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format of the file's suffix. Raises ConfigError."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}; name an image file to write, such as plot.png") from None


def plot_comparison(a: Mapping[str, Any], b: Mapping[str, Any], path: Path) -> None:
    """Write a bar chart of B relative to A in %. Raises ConfigError, also without matplotlib."""
    left, right = comparable(a), comparable(b)
    changes = {k: change for k in left if (change := change_of(left[k], right.get(k))) is not None}
    figure = new_figure(9, 1 + 0.3 * len(changes))
    axes = figure.add_subplot()
    colors = ["tab:green" if is_better(key, change) else "tab:red" for key, change in changes.items()]
    axes.barh(list(changes), [change * 100 for change in changes.values()], color=colors)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel("change from A to B (%)")
    save_figure(figure, path)


def plot_loads(results: Sequence[Mapping[str, Any]], name: LoadName, path: Path) -> None:
    """Draw throughput and latencies over the load. Raises ConfigError, also without matplotlib."""
    figure = new_figure(9, 3.6)
    loads = [result[name] for result in results]
    load_label = "requests in flight" if name == "max_concurrency" else "requests per second"
    latencies = {label: key for label, key in LOAD_COLUMNS.items() if key.endswith("_ms")}
    groups = {"tokens per second": {"output": "output_throughput"}, "ms": latencies}
    for axes, (unit, curves) in zip(figure.subplots(1, len(groups)), groups.items(), strict=True):
        for label, key in curves.items():
            axes.plot(loads, [result[key] for result in results], marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(load_label)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def plot_sizes(tier: str, results: Sequence[Mapping[str, Any]], path: Path) -> None:
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
    num_windows = max(1, min(60, len(prompts) // 10))  # ten requests each, at most 60 windows
    windows = np.arange(len(prompts)) * num_windows // len(prompts)
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
