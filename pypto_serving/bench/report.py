"""Render results as tables, save them as JSON with the keys of `vllm bench serve`, and compare two results."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from pypto_serving.bench.metrics import RequestRecord, details, summarize
from pypto_serving.bench.options import METRICS, LoadName, Reporting, Target, Traffic
from pypto_serving.errors import ConfigError
from pypto_serving.types.tier import TIERS
from pypto_serving.util import decode_json

_WIDTH = 50
_HEADINGS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_HEAD_ROWS = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)
_DRAFT_ROWS = (
    ("Acceptance rate (%):", "acceptance_rate", ".2f"),
    ("Acceptance length:", "acceptance_length", ".2f"),
    ("Drafts:", "num_drafts", "d"),
    ("Draft tokens:", "draft_tokens", "d"),
    ("Accepted tokens:", "accepted_tokens", "d"),
)
_HIT_RATE_BOUNDS = (
    ("LRU cache of all tiers' size", "lru_hit_rate"),
    ("Infinite cache", "infinite_hit_rate"),
)
_OPTIONAL_ROWS = ("max_concurrency", "request_rate", "request_goodput")
_LATENCY_KEY = re.compile(rf"(mean|median|p[\d.]+)_({'|'.join(METRICS)})_ms")
_HIGHER_IS_BETTER = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
_SETTINGS = ("model_id", "backend", "num_prompts", "request_rate", "burstiness", "max_concurrency")

LOAD_COLUMNS = {
    "req/s": "request_throughput",
    "output tok/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "ITL p99": "p99_itl_ms",
    "failed": "failed",
}
"""Columns of a sweep over loads: headings and keys of results; latencies in ms."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Where and how to save a result. If `file` is None, the settings make the name."""

    directory: Path = Path()
    file: str | None = None
    detailed: bool = False
    metadata: Mapping[str, str]

    def check(self, reporting: Reporting) -> None:
        """Create the folder. Raises ConfigError if that fails, or if a result key would hide metadata."""
        taken = settings(Target(), Traffic(), "", None) | summarize([], 1.0, reporting) | details([])
        if clash := sorted(taken.keys() & self.metadata.keys()):
            raise ConfigError(f"--metadata {clash[0]}=...: the result has a key of that name; choose another")
        folder = (self.directory / (self.file or "-")).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot save to {folder}: {error.strerror}; set --result-dir") from None

    def write(self, result: Mapping[str, Any]) -> Path:
        """Write `result` as one JSON object and return the path. Raises ConfigError."""
        path = self.directory / (self.file or _file_name(result))
        try:
            path.write_bytes(msgspec.json.encode({**self.metadata, **result}) + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot save {path}: {error.strerror}; set --result-filename") from None
        return path


def timestamp() -> str:
    """Return the present time, in the format of results and their file names."""
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def settings(target: Target, traffic: Traffic, model: str, tokenizer: str | None) -> dict[str, Any]:
    """Return the settings of a run, for the result."""
    result = {
        "date": timestamp(),
        "backend": target.backend,
        "model_id": model,
        "tokenizer_id": tokenizer,
        "num_prompts": traffic.num_prompts,
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
    }
    if traffic.ramp_up is not None:
        result |= {f"ramp_up_{name}": value for name, value in vars(traffic.ramp_up).items()}
    return result


def render(result: Mapping[str, Any]) -> str:
    """Render a result as the table of `vllm bench serve`."""
    lines = [f"{' Serving Benchmark Result ':=^{_WIDTH}}"]
    for label, key, style in _HEAD_ROWS:
        value = result[key]
        if key not in _OPTIONAL_ROWS or not (value is None or value == "inf"):
            lines.append(_row(label, value, style))
    metric = ""
    for key, value in result.items():
        if match := _LATENCY_KEY.fullmatch(key):
            if match[2] != metric:
                metric = match[2]
                lines.append(f"{_HEADINGS[metric]:-^{_WIDTH}}")
            lines.append(_row(f"{match[1].capitalize()} {metric.upper()} (ms):", value, ".2f"))
    return "\n".join([*lines, *_draft_lines(result), *_cache_lines(result), "=" * _WIDTH])


def _draft_lines(result: Mapping[str, Any]) -> list[str]:
    """Return table lines about drafts, if the server made any."""
    if not result.get("spec_decode_num_drafts"):
        return []
    rates = result["spec_decode_per_position_acceptance_rates"]
    return [
        f"{'Speculative Decoding':-^{_WIDTH}}",
        *(_row(label, result[f"spec_decode_{key}"], style) for label, key, style in _DRAFT_ROWS),
        "Per-position acceptance (%):",
        *(_row(f"  Position {i}:", rate * 100, ".2f") for i, rate in enumerate(rates)),
    ]


def _cache_lines(result: Mapping[str, Any]) -> list[str]:
    """Return table lines about cached tokens, if the result has them."""
    if "hit_rate" not in result:
        return []
    rates = {"Hit rate": result["hit_rate"]}
    rates |= {f"  from {tier}": rate for tier, rate in result["hit_rate_by_tier"].items()}
    rates |= {label: result[key] for label, key in _HIT_RATE_BOUNDS if key in result}
    percents = {label: None if rate is None else rate * 100 for label, rate in rates.items()}
    return [
        f"{'KV Cache':-^{_WIDTH}}",
        _row("Cached prompt tokens:", result["total_cached_tokens"], "d"),
        *(_row(f"{label} (%):", value, ".2f") for label, value in percents.items()),
    ]


def failure_lines(records: Sequence[RequestRecord]) -> list[str]:
    """Return one line per distinct error message with its count: the ten most frequent."""
    errors = Counter(r.error for r in records if r.error)
    return [f"failed: {count} x {error}" for error, count in errors.most_common(10)]


def load_result(path: Path) -> dict[str, Any]:
    """Load a saved result, ours or vLLM's. Raises ConfigError."""
    try:
        result = decode_json(path.read_bytes(), dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name a file that --save-result wrote") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not a JSON object ({error}); name a file that --save-result wrote") from None
    if not comparable(result):
        raise ConfigError(f"{path} holds no benchmark metrics; name a file that --save-result wrote")
    return result


def comparable(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the metrics of `result` that have a better direction, in table order."""
    keys = [k for k in _HIGHER_IS_BETTER if k in result] + [k for k in result if _LATENCY_KEY.fullmatch(k)]
    return {k: result[k] if isinstance(result[k], int | float) else None for k in keys}


def render_comparison(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Render metrics of A and B side by side, with the change from A to B and the settings that differ."""
    lines = [f"{'':<30}{'A':>14}{'B':>14}{'change':>10}", "-" * 76]
    differing = (k for k in _SETTINGS if a.get(k) != b.get(k))
    lines += [f"{k:<30}{a.get(k)!s:>14}{b.get(k)!s:>14}  settings differ" for k in differing]
    lines += [f"{k:<30}{a.get(k, 'n/a')!s:>14}{b.get(k, 'n/a')!s:>14}" for k in ("completed", "failed")]
    left, right = comparable(a), comparable(b)
    for key in left | right:
        lines.append(_compare(key, left.get(key), right.get(key)))
    return "\n".join(lines)


def render_loads(results: Sequence[Mapping[str, Any]], name: LoadName) -> str:
    """Render one line for each load, a value of the setting `name`."""
    heading = "in flight" if name == "max_concurrency" else "sent/s"
    lines = [f"{heading:>10}" + "".join(f"{column:>14}" for column in LOAD_COLUMNS)]
    for result in results:
        values = [result.get(key) for key in LOAD_COLUMNS.values()]
        cells = ["n/a" if v is None else str(v) if isinstance(v, int) else f"{v:.2f}" for v in values]
        lines.append(f"{result[name]:>10g}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines)


def render_sizes(tier: str, results: Sequence[Mapping[str, Any]]) -> str:
    """Render one line per size: hit rates by tier and of LRU caches (same size, infinite), and latencies."""
    tiers = [name for name in TIERS if any(name in r["hit_rate_by_tier"] for r in results)]
    shown = tiers if len(tiers) > 1 else []
    head = [f"{tier} tokens", "hit rate", *shown, "LRU", "infinite", "median TTFT s", "p99 TTFT s", "output tok/s"]
    rows = [head]
    for result in results:
        rates = [result["hit_rate"], *(result["hit_rate_by_tier"].get(name, 0.0) for name in shown)]
        rates += [result["lru_hit_rate"], result["infinite_hit_rate"]]
        ttfts = [
            ("n/a" if result[key] is None else f"{result[key] / 1e3:.3g}") for key in ("median_ttft_ms", "p99_ttft_ms")
        ]
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


def _row(label: str, value: float | None, style: str) -> str:
    return f"{label:<40} {'n/a' if value is None else format(value, style):<10}"


def _file_name(result: Mapping[str, Any]) -> str:
    concurrency = result["max_concurrency"]
    limit = "" if concurrency is None else f"-concurrency{concurrency}"
    model = result["model_id"].rsplit("/", 1)[-1]
    return f"{result['backend']}-{result['request_rate']}qps{limit}-{model}-{result['date']}.json"


def _compare(key: str, a: float | None, b: float | None) -> str:
    numbers = "".join(f"{'n/a' if value is None else f'{value:.2f}':>14}" for value in (a, b))
    change = change_of(a, b)
    if change is None:
        return f"{key:<30}{numbers}{'n/a':>10}"
    verdict = "" if change == 0 else "  better" if is_better(key, change) else "  worse"
    return f"{key:<30}{numbers}{change:>+10.1%}{verdict}"


def change_of(a: float | None, b: float | None) -> float | None:
    """Return b / a - 1, or None if it is undefined."""
    return None if a is None or b is None or a == 0 else b / a - 1


def is_better(key: str, change: float) -> bool:
    """Return whether a nonzero change of a metric is an improvement."""
    return (change > 0) == (key in _HIGHER_IS_BETTER)
