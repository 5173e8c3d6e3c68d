"""Write the comparison as tables and a plot from recorded runs.

A record is {"pairs": {peer: {"about", "systems", "runs"}}}; compare.py fills it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    "W1": (OUTPUT, TTFT, ITL),
    "W2": (OUTPUT, TTFT, ITL),
    "W3": (OUTPUT, TTFT, ITL),
    "W4": (PROMPT, TTFT),
    "W5": (OUTPUT, TTFT, ITL),
    "P99": (P99, LONG),
    "T1": (OUTPUT, TTFT, ITL),
}


@dataclass(frozen=True)
class Goal:
    """The ratio first / second of a pair in one metric: at least `ratio` if higher is better, else at most."""

    workload: str
    metric: Metric
    pair: str
    ratio: float

    def met(self, ratio: float) -> bool:
        """Return whether a measured ratio meets the goal."""
        return ratio >= self.ratio if self.metric.higher else ratio <= self.ratio

    @property
    def text(self) -> str:
        """Return the goal as text for a table."""
        return f"{'at least' if self.metric.higher else 'at most'} {self.ratio:g}"


GOALS = (
    Goal("W1", OUTPUT, "vllm", 1.0),
    Goal("W1", OUTPUT, "llama", 1.0),
    Goal("W2", OUTPUT, "vllm", 1.3),
    Goal("W2", ITL, "vllm", 0.7),
    Goal("W2", OUTPUT, "llama", 2.0),
    Goal("W3", OUTPUT, "vllm", 1.3),
    Goal("W3", ITL, "vllm", 0.65),
    Goal("W3", OUTPUT, "llama", 2.5),
    Goal("W4", PROMPT, "vllm", 1.1),
    Goal("W5", OUTPUT, "vllm", 1.6),
    Goal("W5", TTFT, "vllm", 0.75),
    Goal("P99", P99, "vllm", 0.7),
    Goal("T1", OUTPUT, "vllm", 1.6),
    Goal("W1", OUTPUT, "int8", 1.7),
    Goal("W2", OUTPUT, "int8", 1.5),
    Goal("W1", OUTPUT, "int8-llmc", 1.45),
    Goal("W2", OUTPUT, "int8-llmc", 1.5),
    Goal("W1", OUTPUT, "int4", 2.6),
    *(Goal(workload, OUTPUT, "tp2", 0.95) for workload in ("W1", "W2", "W3")),
    *(Goal(workload, OUTPUT, "vllm-tp2", 1.3) for workload in ("W1", "W2", "W3")),
    Goal("W3", OUTPUT, "pp2", 0.85),
    Goal("W1", OUTPUT, "llama-q4", 1.3),
    Goal("W2", OUTPUT, "llama-q4", 2.0),
    Goal("W4", PROMPT, "llama-q4", 2.5),
    Goal("W1", OUTPUT, "vllm-gptq", 1.3),
    Goal("W2", OUTPUT, "vllm-gptq", 1.3),
    Goal("W3", OUTPUT, "vllm-gptq", 1.3),
)
MEMORY_GOAL = 0.5
"""Largest ratio of our resident memory without keys and values to vLLM's."""
OWN_PAIRS = ("int8", "int8-llmc", "int4", "tp2", "pp2")
"""Pairs of two of our servers; ratios are over the bf16 checkpoint on one rank."""
SHARE_GOAL = 0.85
"""Smallest share of the read bandwidth that a stream uses for weights, at 4 bits."""


@dataclass(frozen=True)
class Ratio:
    """The ratio first / second of medians, with the lowest and highest ratio of the rounds."""

    first: float
    second: float
    value: float
    low: float
    high: float


def kept(runs: Sequence[Run]) -> list[Run]:
    """Keep one attempt per round, workload and side: the first with little foreign load, else that with the least."""
    attempts: dict[tuple[int, str, str], list[Run]] = {}
    for run in runs:
        attempts.setdefault((run["round"], run["workload"], run["side"]), []).append(run)
    return [min(tries, key=lambda run: max(NOISY, run["load"]["foreign"])) for tries in attempts.values()]


def ratio(runs: Sequence[Run], metric: Metric, first: str, second: str) -> Ratio | None:
    """Return the ratio over the kept runs of one workload, or None if a side has no values."""
    seen: dict[str, dict[int, float]] = {first: {}, second: {}}
    for run in runs:
        value = metric.of(run)
        if run["side"] in seen and value is not None:
            seen[run["side"]][run["round"]] = value
    rounds = [seen[first][number] / seen[second][number] for number in seen[first].keys() & seen[second].keys()]
    if not rounds:
        return None
    one, other = (statistics.median(seen[side].values()) for side in (first, second))
    return Ratio(one, other, one / other, min(rounds), max(rounds))


def sides(pair: str) -> tuple[str, str]:
    """Return the systems of a pair as (numerator, denominator)."""
    return (pair, "ours") if pair in OWN_PAIRS else ("ours", pair)


def comparisons(record: Record) -> Iterator[tuple[str, str, Metric, Ratio]]:
    """Yield pair, workload, metric and ratio of everything measured, in the order of the tables."""
    for pair, measured in record["pairs"].items():
        runs = kept(measured["runs"])
        for workload, metrics in SHOWN.items():
            mine = [run for run in runs if run["workload"] == workload]
            for metric in metrics:
                if (found := ratio(mine, metric, *sides(pair))) is not None:
                    yield pair, workload, metric, found


def goal_cells(pair: str, workload: str, metric: Metric, value: float) -> list[str]:
    """Return the cells with the goal of a row and whether it is met; empty if there is none."""
    for goal in GOALS:
        if (goal.pair, goal.workload, goal.metric) == (pair, workload, metric):
            return [goal.text, "yes" if goal.met(value) else "**no**"]
    return ["", ""]


def result_table(record: Record, pair: str) -> list[list[str]]:
    """Return one row per workload and metric of a pair."""
    systems = record["pairs"][pair]["systems"]
    first, second = sides(pair)
    rows = [["workload", "metric", systems[first]["title"], systems[second]["title"], "ratio (rounds)", "goal", "met"]]
    for name, workload, metric, found in comparisons(record):
        if name == pair:
            values = [f"{value:.{metric.digits}f}" for value in (found.first, found.second)]
            spread = f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})"
            rows.append([workload, metric.name, *values, spread, *goal_cells(pair, workload, metric, found.value)])
    return rows


def system_table(record: Record) -> list[list[str]]:
    """Return the costs of each system: start, disk, memory. Ours are those measured with the first peer."""
    heading = ["system", "versions", "ready s", "installed GiB"]
    rows = [[*heading, "peak RSS GiB", "resident GiB", "without KV GiB", "client CPU"]]
    for title, (system, runs) in _systems(record).items():
        rows.append([title, _versions(system["facts"]), *_costs(system), _client(runs)])
    return rows


def memory_line(record: Record) -> str | None:
    """Return the line on the memory goal, if vLLM was measured."""
    measured = record["pairs"].get("vllm")
    if not measured or not all(system["memory"] for system in measured["systems"].values()):
        return None
    mine, theirs = (_median_memory(measured["systems"][side], "without_kv") for side in ("ours", "vllm"))
    met = "met" if mine <= MEMORY_GOAL * theirs else "**not met**"
    said = f"{mine / theirs:.2f} (at most {MEMORY_GOAL}: {met})"
    return f"Resident memory of all processes without keys and values, ours over vLLM's: {said}."


def shares(record: Record) -> Iterator[str]:
    """Yield a line per system that tells the bytes of a token: the share of the read bandwidth that W1 reaches."""
    for name, pair in record["pairs"].items():
        for side, system in pair["systems"].items():
            runs = [run for run in kept(pair["runs"]) if (run["side"], run["workload"]) == (side, "W1")]
            if not runs or not (size := system.get("token_bytes")):
                continue
            rates = [size / run["median_itl_ms"] * 1e3 for run in runs]
            reads = [(run["read_before"] + run["read_after"]) / 2 for run in runs]
            found = [rate / read for rate, read in zip(rates, reads, strict=True)]
            share, goal = statistics.median(found), ""
            if (name, side) == ("llama-q4", "ours"):
                goal = f", at least {SHARE_GOAL}: {'met' if share >= SHARE_GOAL else '**not met**'}"
            span = f"{min(found):.2f} to {max(found):.2f}"
            yield (
                f"{system['title']}: between tokens W1 reads {size / 1e9:.3f} GB of weights, at "
                f"{statistics.median(rates) / 1e9:.0f} GB/s; share of the bandwidth measured beside each run "
                f"{share:.2f} ({span}){goal}."
            )


def notes(record: Record) -> Iterator[str]:
    """Yield one line per pair: the machine, its load and its read bandwidth."""
    for pair, measured in record["pairs"].items():
        runs, about = kept(measured["runs"]), measured["about"]
        if not runs:
            continue
        noisy = [run for run in runs if run["load"]["foreign"] > NOISY]
        repeated = len(measured["runs"]) - len(runs)
        foreign = statistics.median(run["load"]["foreign"] for run in runs)
        stolen = statistics.median(run["load"]["stolen"] for run in runs)
        reads = sorted(value / 1e9 for run in runs for value in (run["read_before"], run["read_after"]))
        middle = statistics.median(reads)
        yield (
            f"{pair}: {about['date']}, {about['cpu']}, {about['cpus']} CPUs, {about['commit']}; {len(runs)} runs, "
            f"{repeated} repeated for load, {len(noisy)} of those kept above {NOISY:.0%}; foreign load {foreign:.1%} "
            f"and stolen time {stolen:.1%} in the median; the machine read at {reads[0]:.0f} to {reads[-1]:.0f} GB/s, "
            f"{middle:.0f} in the median."
        )


def flags(record: Record) -> Iterator[str]:
    """Yield the flags of each system, and how many of its first answers agree with ours."""
    for system, _ in _systems(record).values():
        same = system.get("agreement")
        agreement = "" if same is None else f"; greedy answers begin like ours in {same} prompts"
        yield f"{system['title']}: `{system['flags']}`{agreement}"


def markdown(record: Record, plot_name: str) -> str:
    """Return the whole section."""
    parts = []
    for pair, measured in record["pairs"].items():
        first, second = (measured["systems"][side]["title"] for side in sides(pair))
        parts.append(f"### {first} over {second}\n\n{_table(result_table(record, pair))}")
    parts.append(f"![ratios of all workloads]({plot_name})")
    parts.append(f"### Cost\n\n{_table(system_table(record))}")
    lines = [line for line in (memory_line(record), *shares(record), *notes(record), *flags(record)) if line]
    parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


BEGIN, END = "<!-- compare.py writes from here -->", "<!-- compare.py writes to here -->"


def insert(document: str, section: str) -> str:
    """Return `document` with the section between its two marks replaced. Raises ValueError without the marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no {BEGIN} followed by {END}")
    return f"{before}{begin}\n{section}{end}{after}"


def plot(path: Path, record: Record) -> bool:
    """Plot the speedup over each peer with the range of the rounds. Return False without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        return False
    matplotlib.rcParams["svg.hashsalt"] = "compare"
    bars: dict[str, dict[str, tuple[float, float, float]]] = {}
    for pair, workload, metric, found in comparisons(record):
        if metric is SHOWN[workload][0]:
            values = [found.value, found.low, found.high]
            faster = values if metric.higher else [1 / value for value in values]
            bars.setdefault(pair, {})[workload] = (faster[0], faster[0] - min(faster), max(faster) - faster[0])
    axes = (figure := Figure(figsize=(8, 3.5), layout="constrained")).add_subplot()
    names, width = list(SHOWN), 0.8 / max(1, len(bars))
    for index, (pair, seen) in enumerate(bars.items()):
        at = [names.index(workload) + (index - (len(bars) - 1) / 2) * width for workload in seen]
        heights, *spans = zip(*seen.values(), strict=True)
        label = f"{pair} over ours" if pair in OWN_PAIRS else f"ours over {pair}"
        axes.bar(at, heights, width * 0.9, yerr=spans, capsize=2, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("speedup")
    if bars:
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(bars), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    return True


def _systems(record: Record) -> dict[str, tuple[Mapping[str, Any], list[Run]]]:
    """Return each system once by its title, with its runs."""
    found: dict[str, tuple[Mapping[str, Any], list[Run]]] = {}
    for measured in record["pairs"].values():
        runs = kept(measured["runs"])
        for name, system in measured["systems"].items():
            if system["title"] not in found:
                found[system["title"]] = (system, [run for run in runs if run["side"] == name])
    return found


def _versions(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


def _costs(system: Mapping[str, Any]) -> list[str]:
    facts, memory = system["facts"], system["memory"]
    ready = f"{statistics.median(system['ready_s']):.1f}" if system["ready_s"] else ""
    cells = [ready, f"{facts['bytes'] / GIB:.2f}"]
    keys = ("peak", "resident", "without_kv")
    return cells + [f"{_median_memory(system, key) / GIB:.2f}" if memory else "" for key in keys]


def _median_memory(system: Mapping[str, Any], key: str) -> float:
    return statistics.median(one[key] for one in system["memory"])


def _client(runs: Sequence[Run]) -> str:
    shares = [run["client_cpu_share"] for run in runs]
    return f"{statistics.median(shares):.0%} of a CPU" if shares else ""


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
