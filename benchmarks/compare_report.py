"""Tables of a comparison. A record has `pair`, `own`, `about`, `systems` and `runs` of two servers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rounds import spread, table

NOISY = 0.05
"""Largest share of the machine's CPU time that other processes may take during a run."""
GIB = 1 << 30
Record = Mapping[str, Any]
Run = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """A column: its key in a run, and whether higher is better."""

    name: str
    key: str
    higher: bool
    digits: int = 1

    def of(self, run: Run) -> float | None:
        """Return the value, or None if the run has none."""
        if self.key == "prompt_throughput":
            return float(run["total_token_throughput"] - run["output_throughput"])
        value = run.get(self.key)
        return None if value is None else float(value)


OUTPUT = Metric("output tok/s", "output_throughput", True)
PROMPT = Metric("prompt tok/s", "prompt_throughput", True, 0)
TTFT = Metric("median TTFT ms", "median_ttft_ms", False, 0)
ITL = Metric("median ITL ms", "median_itl_ms", False)
P99 = Metric("p99 ITL ms", "p99_itl_ms", False)
LONG = Metric("TTFT of the long prompt ms", "long_ttft_ms", False, 0)

SHOWN: dict[str, tuple[Metric, ...]] = {
    **dict.fromkeys(("W1", "W2", "W3"), (OUTPUT, TTFT, ITL)),
    "W4": (PROMPT, TTFT),
    "W5": (OUTPUT, TTFT, ITL),
    "P99": (P99, LONG),
    "T1": (OUTPUT, TTFT, ITL),
}
GOALS: dict[str, dict[tuple[str, Metric], float]] = {
    "vllm": {
        ("W1", OUTPUT): 1.0,
        ("W2", OUTPUT): 1.3,
        ("W2", ITL): 0.7,
        ("W3", OUTPUT): 1.3,
        ("W3", ITL): 0.65,
        ("W4", PROMPT): 1.1,
        ("W5", OUTPUT): 1.6,
        ("W5", TTFT): 0.75,
        ("P99", P99): 0.7,
        ("T1", OUTPUT): 1.6,
    },
    "llama": {("W1", OUTPUT): 1.0, ("W2", OUTPUT): 2.0, ("W3", OUTPUT): 2.5},
    "int8": {("W1", OUTPUT): 1.7, ("W2", OUTPUT): 1.5},
    "int4": {("W1", OUTPUT): 2.6},
    "llama-q4": {("W1", OUTPUT): 1.3, ("W2", OUTPUT): 2.0, ("W4", PROMPT): 2.5},
    "vllm-gptq": {(workload, OUTPUT): 1.3 for workload in ("W1", "W2", "W3")},
    "tp2": {(workload, OUTPUT): 0.95 for workload in ("W1", "W2", "W3")},
    "pp2": {("W3", OUTPUT): 0.85},
    "vllm-tp2": {(workload, OUTPUT): 1.3 for workload in ("W1", "W2", "W3")},
}
"""Goals of each pair: the smallest ratio of a metric if higher is better, else the largest."""
MEMORY_GOAL = 0.5
"""Largest ratio of our resident memory without keys and values to vLLM's."""


@dataclass(frozen=True)
class Ratio:
    """The ratio first / second of medians, and that of each round."""

    first: float
    second: float
    rounds: tuple[float, ...]

    @property
    def value(self) -> float:
        """Return the ratio of the medians."""
        return self.first / self.second


def summary(run: Run) -> str:
    """Return a run's metrics as a line."""
    values = ((metric, metric.of(run)) for metric in SHOWN[run["workload"]])
    shown = ", ".join(f"{metric.name} {value:.{metric.digits}f}" for metric, value in values if value is not None)
    return f"{shown}; foreign {run['foreign']:.1%}, read {run['read_before'] / 1e9:.0f} GB/s"


def kept(runs: Sequence[Run]) -> list[Run]:
    """Keep one attempt per round, workload and side: the first with little foreign load, else that with the least."""
    attempts: dict[tuple[int, str, str], list[Run]] = {}
    for run in runs:
        attempts.setdefault((run["round"], run["workload"], run["side"]), []).append(run)
    return [min(tries, key=lambda run: max(NOISY, run["foreign"])) for tries in attempts.values()]


def ratio(runs: Sequence[Run], metric: Metric, first: str, second: str) -> Ratio | None:
    """Return the ratio over the kept runs of one workload, or None if a side has no values."""
    seen: dict[str, dict[int, float]] = {first: {}, second: {}}
    for run in runs:
        value = metric.of(run)
        if run["side"] in seen and value is not None:
            seen[run["side"]][run["round"]] = value
    rounds = tuple(seen[first][number] / seen[second][number] for number in seen[first].keys() & seen[second].keys())
    if not rounds:
        return None
    one, other = (statistics.median(seen[side].values()) for side in (first, second))
    return Ratio(one, other, rounds)


def goal_cells(pair: str, workload: str, metric: Metric, value: float) -> list[str]:
    """Return the cells with the goal of a row and whether it is met; empty if there is none."""
    goal = GOALS.get(pair, {}).get((workload, metric))
    if goal is None:
        return ["", ""]
    met = value >= goal if metric.higher else value <= goal
    return [f"{'at least' if metric.higher else 'at most'} {goal:g}", "yes" if met else "**no**"]


def result_table(record: Record) -> list[list[str]]:
    """Return one row per workload and metric of a pair: ours over the peer's, or the variant of ours over ours."""
    pair, systems, runs = record["pair"], record["systems"], kept(record["runs"])
    first, second = (pair, "ours") if record["own"] else ("ours", pair)
    rows = [["workload", "metric", systems[first]["title"], systems[second]["title"], "ratio (rounds)", "goal", "met"]]
    for workload, metrics in SHOWN.items():
        mine = [run for run in runs if run["workload"] == workload]
        for metric in metrics:
            if (found := ratio(mine, metric, first, second)) is not None:
                values = [f"{value:.{metric.digits}f}" for value in (found.first, found.second)]
                ratios = f"{found.value:.2f} ({min(found.rounds):.2f} to {max(found.rounds):.2f})"
                rows.append([workload, metric.name, *values, ratios, *goal_cells(pair, workload, metric, found.value)])
    return rows


def system_table(records: Sequence[Record]) -> list[list[str]]:
    """Return the costs of each system: start, disk, memory. Of a system in several pairs, those of the first."""
    rows = [["system", "versions", "ready s", "installed GiB", "peak RSS GiB", "resident GiB", "without KV GiB"]]
    systems = {system["title"]: system for record in reversed(records) for system in record["systems"].values()}
    for title, system in systems.items():
        if not system["memory"]:  # an error ended its first round
            continue
        versions = ", ".join(f"{name} {version}" for name, version in system["facts"]["versions"].items())
        sizes = [f"{median_memory(system, key) / GIB:.2f}" for key in ("peak", "resident", "without_kv")]
        ready, installed = statistics.median(system["ready_s"]), system["facts"]["bytes"] / GIB
        rows.append([title, versions, f"{ready:.1f}", f"{installed:.2f}", *sizes])
    return rows


def median_memory(system: Mapping[str, Any], key: str) -> float:
    """Return the median of a system's memory over the rounds."""
    return statistics.median(one[key] for one in system["memory"])


def memory_line(record: Record) -> str:
    """Return the line on the memory goal, beside vLLM."""
    mine, theirs = (median_memory(record["systems"][side], "without_kv") for side in ("ours", "vllm"))
    met = "met" if mine <= MEMORY_GOAL * theirs else "**not met**"
    said = f"{mine / theirs:.2f} (at most {MEMORY_GOAL}: {met})"
    return f"Resident memory of all processes without keys and values, ours over vLLM's: {said}."


def shares(record: Record) -> Iterator[str]:
    """Yield the share of the read bandwidth that weights take in W1, for each system that says their bytes."""
    for side, system in record["systems"].items():
        runs = [run for run in kept(record["runs"]) if (run["side"], run["workload"]) == (side, "W1")]
        if runs and (size := system["token_bytes"]):
            rates = [size / run["median_itl_ms"] * 1e3 for run in runs]
            found = [2 * rate / (run["read_before"] + run["read_after"]) for rate, run in zip(rates, runs, strict=True)]
            read = f"W1 reads {size / 1e9:.3f} GB of weights a token, at {statistics.median(rates) / 1e9:.0f} GB/s"
            yield f"{system['title']}: {read}; share of the bandwidth beside each run {spread(found)}."


def note(record: Record) -> str:
    """Return the machine of a pair, its load and its read bandwidth."""
    runs, about = kept(record["runs"]), record["about"]
    noisy = [run for run in runs if run["foreign"] > NOISY]
    foreign = statistics.median(run["foreign"] for run in runs)
    reads = [value / 1e9 for run in runs for value in (run["read_before"], run["read_after"])]
    return (
        f"{record['pair']}: {about['date']}, {about['cpu']}, {about['cpus']} CPUs, {about['commit']}; {len(runs)} "
        f"runs, {len(record['runs']) - len(runs)} repeated for load, {len(noisy)} kept above {NOISY:.0%}; foreign load "
        f"{foreign:.1%} in the median; the machine read at {spread(reads, 0)} GB/s."
    )


def markdown(records: Sequence[Record]) -> str:
    """Return the whole report."""
    parts = []
    for record in records:
        rows = result_table(record)
        parts.append(f"## {rows[0][2]} over {rows[0][3]}\n\n{table(rows)}")
    parts.append(f"## Cost\n\n{table(system_table(records))}")
    lines = []
    for record in records:
        measured = record["pair"] == "vllm" and all(system["memory"] for system in record["systems"].values())
        lines += [*([memory_line(record)] if measured else []), *shares(record), note(record)]
        for system in record["systems"].values():
            same = system.get("agreement")
            agreement = "" if same is None else f"; greedy answers begin like ours in {same} prompts"
            lines.append(f"{system['title']}: `{system['flags']}`{agreement}")
    parts.append("\n".join(f"- {line}" for line in dict.fromkeys(lines)))
    return "\n\n".join(parts) + "\n"
