"""Measure a server at several loads: one benchmark for each, their table and their plot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pypto_serving.bench.report import new_figure, save_figure
from pypto_serving.bench.runner import Advance, Benchmark, run
from pypto_serving.errors import ConfigError

COLUMNS = {
    "req/s": "request_throughput",
    "output tok/s": "output_throughput",
    "TTFT p50": "median_ttft_ms",
    "TTFT p99": "p99_ttft_ms",
    "TPOT p50": "median_tpot_ms",
    "ITL p99": "p99_itl_ms",
    "failed": "failed",
}
"""Headings and keys of results; latencies in ms."""
CONCURRENCY, RATE = "max_concurrency", "request_rate"


def parse_loads(flag: str, text: str, kind: type[int] | type[float]) -> list[int] | list[float]:
    """Read `1,2,4`: positive numbers of a kind, ascending. Raises ConfigError."""
    try:
        loads = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        loads = []
    if not loads or not all(0 < load < math.inf for load in loads):
        numbers = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{flag} is {text!r}, but must be positive {numbers} such as 1,2,4")
    return loads


async def sweep(benchmark: Benchmark, name: str, loads: Sequence[float], advance: Advance) -> list[dict[str, Any]]:
    """Run the benchmark at each load, with other prompts each time; return the results.

    `name` is the field of Traffic that a load is a value of.
    """
    results = []
    for i, load in enumerate(loads):
        changes: dict[str, Any] = {name: load, "seed": benchmark.traffic.seed + i}
        at_load = replace(benchmark, traffic=replace(benchmark.traffic, **changes))
        results.append((await run(at_load, advance)).result)
    return results


def table(results: Sequence[dict[str, Any]], name: str) -> Iterator[str]:
    """Write one line for each load."""
    heading = "in flight" if name == CONCURRENCY else "sent/s"
    yield f"{heading:>10}" + "".join(f"{column:>14}" for column in COLUMNS)
    for result in results:
        cells = [f"{_shown(result.get(key)):>14}" for key in COLUMNS.values()]
        yield f"{result[name]:>10g}" + "".join(cells)


def plot(results: Sequence[dict[str, Any]], name: str, path: Path) -> None:
    """Draw throughput and latencies over the load. Raises ConfigError, also without matplotlib."""
    figure = new_figure(9, 3.6)
    loads = [result[name] for result in results]
    label = "requests in flight" if name == CONCURRENCY else "requests per second"
    groups = {"tokens per second": ("output tok/s",), "ms": ("TTFT p50", "TTFT p99", "TPOT p50", "ITL p99")}
    for axes, (unit, columns) in zip(figure.subplots(1, len(groups)), groups.items(), strict=True):
        for column in columns:
            axes.plot(loads, [result[COLUMNS[column]] for result in results], marker="o", label=column)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(label)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend()
        axes.grid(alpha=0.3)
    save_figure(figure, path)


def _shown(value: float | None) -> str:
    return "n/a" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"
