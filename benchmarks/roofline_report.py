"""Results beside the limits of the machine: as tables, as JSON, as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from roofline_kernels import Result
from roofline_steps import REST, STEP

from pypto_serving.kernels import Engine
from pypto_serving.kernels.roofline import Memory, peak


@dataclass
class Ceilings:
    """The machine's limits, measured again and again between the groups of cases, for other tenants come and go.

    Bytes per second with all threads; operations per second with all threads and with one.
    """

    bandwidths: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    int8_peaks: list[float] = field(default_factory=list)
    single_peaks: list[float] = field(default_factory=list)

    def measure(self, memory: Memory, engine: Engine, single: Engine) -> None:
        """Add one measurement of each."""
        self.bandwidths.append(memory.bandwidth(engine))
        self.peaks.append(peak(engine))
        self.int8_peaks.append(peak(engine, int8=True))
        self.single_peaks.append(peak(single))

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return max(self.bandwidths)

    @property
    def peak(self) -> float:
        """Operations per second of all threads."""
        return max(self.peaks)

    @property
    def int8_peak(self) -> float:
        """The same on int8."""
        return max(self.int8_peaks)

    def lines(self) -> Iterator[str]:
        """All that was seen, best first."""
        named = (
            ("read bandwidth", "GB/s", self.bandwidths),
            ("dot products, all threads", "GFLOP/s", self.peaks),
            ("dot products of int8, all threads", "GOP/s", self.int8_peaks),
            ("dot products, one thread", "GFLOP/s", self.single_peaks),
        )
        for name, unit, values in named:
            seen = ", ".join(f"{value / 1e9:.1f}" for value in values)
            yield f"{name}: {max(values) / 1e9:.1f} {unit} (seen {seen})"


@dataclass(frozen=True)
class Rated:
    """A result with its bytes, its operations, and which of the limits binds it."""

    result: Result
    bytes: float
    flops: float
    bound: str

    @staticmethod
    def of(result: Result, ceilings: Ceilings) -> Rated:
        """What binds it is decided by the best limits."""
        total_bytes, flops = sum(w.bytes for w in result.works), sum(w.flops for w in result.works)
        compute_s = sum(w.compute_seconds(ceilings.peak, ceilings.int8_peak) for w in result.works)
        bound = "memory" if total_bytes / ceilings.bandwidth >= compute_s else "compute"
        return Rated(result, total_bytes, flops, bound if result.works else "")

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes, operations."""
        r = self.result
        times = {"best_s": r.best, "median_s": r.median, "limit_s": r.limit, "fraction": r.fraction}
        rival = {"torch_best_s": r.torch[0], "torch_median_s": r.torch[1]} if r.torch else {}
        work = {"bytes": self.bytes, "flops": self.flops, "bound": self.bound}
        return {"name": r.name, "shape": r.shape, **times, **work, **rival}


Rows = list[list[str]]
TIMES = ["best µs", "median µs"]
RATES = ["MB", "GFLOP", "GB/s", "GFLOP/s", "limit µs", "bound by", "of limit"]
RIVAL = ["torch best µs", "torch median µs", "torch / ours"]


def kernel_table(rated: Sequence[Rated]) -> Rows:
    """A heading and one line per case."""
    rival = any(one.result.torch for one in rated)
    rows = [["kernel", "shape", *TIMES, *RATES, *(RIVAL if rival else [])]]
    for one in rated:
        row = [one.result.name, one.result.shape, *_times(one), *_rates(one)]
        if rival:
            theirs = one.result.torch
            ratio = [f"{theirs[0] / one.result.best:.2f}"] if theirs else [""]
            row += [f"{1e6 * value:.1f}" for value in theirs or ()] + [""] * (0 if theirs else 2) + ratio
        rows.append(row)
    return rows


def step_table(rated: Sequence[Rated]) -> Rows:
    """A heading and one line per kind of operation of each step, with its share of the step's median time."""
    whole = {one.result.shape: one for one in rated if one.result.name == STEP}
    rows = [["step", "operation", *TIMES, "share", *RATES]]
    for one in rated:
        share = one.result.median / whole[one.result.shape].result.median
        rates = [""] * len(RATES) if one.result.name == REST else _rates(one)
        rows.append([one.result.shape, one.result.name, *_times(one), f"{share:.1%}", *rates])
    return rows


def speed_table(rated: Sequence[Rated], tokens: dict[str, int]) -> Rows:
    """A heading and one line per step: tokens per second as measured and at the limit. `tokens`: of each step."""
    rows = [["step", "tok/s best", "tok/s median", "tok/s at the limit", "of limit"]]
    for one in rated:
        if one.result.name == STEP:
            count, times = tokens[one.result.shape], (one.result.best, one.result.median, one.result.limit)
            rows.append([one.result.shape, *(f"{count / value:.1f}" for value in times), f"{one.result.fraction:.0%}"])
    return rows


def _times(one: Rated) -> list[str]:
    return [f"{1e6 * one.result.best:.1f}", f"{1e6 * one.result.median:.1f}"]


def _rates(one: Rated) -> list[str]:
    best = one.result.best
    amounts = [f"{one.bytes / 1e6:.2f}", f"{one.flops / 1e9:.3f}"]
    speeds = [f"{one.bytes / best / 1e9:.1f}", f"{one.flops / best / 1e9:.1f}"]
    return [*amounts, *speeds, f"{1e6 * one.result.limit:.1f}", one.bound, f"{one.result.fraction:.0%}"]


def show(console: Console, title: str, rows: Rows) -> None:
    """Print a table; text to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(rows[0]):
        table.add_column(
            heading, justify="left" if i < 2 and heading in ("kernel", "shape", "step", "operation") else "right"
        )
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)


def markdown(title: str, rows: Rows) -> str:
    """The same table for a file."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def save_json(path: Path, about: dict[str, Any], ceilings: Ceilings, **tables: Sequence[Rated]) -> None:
    """Everything in seconds, bytes and operations."""
    content = {
        **about,
        "limits": vars(ceilings),
        **{name: [r.as_json() for r in rows] for name, rows in tables.items()},
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def plot(path: Path, rated: Sequence[Rated], ceilings: Ceilings) -> bool:
    """Operations per second over operations per byte under the machine's roof; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(9, 6), layout="constrained")).add_subplot()
    shown = [one for one in rated if one.flops]
    intensities = [one.flops / one.bytes for one in shown]
    ends = (min([*intensities, 0.1]), max([*intensities, 1000.0]))
    ridges = (top / ceilings.bandwidth for top in (ceilings.peak, ceilings.int8_peak))
    roof = sorted((*ends, *ridges))
    for top, style, label in ((ceilings.peak, "-", "limit"), (ceilings.int8_peak, "--", "limit of int8")):
        heights = [min(top, x * ceilings.bandwidth) / 1e9 for x in roof]
        axes.loglog(roof, heights, style, color="black", label=label)
    for index, name in enumerate(dict.fromkeys(one.result.name for one in shown)):
        mine = [one for one in shown if one.result.name == name]
        x, y = [one.flops / one.bytes for one in mine], [one.flops / one.result.best / 1e9 for one in mine]
        axes.scatter(x, y, s=18, label=name, marker="osD^vPX"[index % 7])
    axes.set(xlabel="FLOP per byte", ylabel="GFLOP/s")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=150)
    return True
