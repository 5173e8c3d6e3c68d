"""Run the standard workloads against our own server and write a table.

    python benchmarks/workloads.py --model DIR_06B --tiny DIR_TINY --repeat 3 --out runs/workloads

| workload | requests at once | prompt tokens           | output tokens | measures       |
|----------|------------------|-------------------------|---------------|----------------|
| W1       | 1                | 128                     | 128           | single stream  |
| W2       | 8                | 128                     | 128           | small batch    |
| W3       | 32               | 128                     | 64            | large batch    |
| W4       | 4                | 2,048                   | 8             | prefill        |
| W5       | 16               | 1,024 shared + 64 own   | 32            | prefix cache   |
| T1       | 64 (tiny model)  | 64                      | 128           | control plane  |

Greedy, ignore_eos, prompts of fresh random token ids. Every run is one `pypto-serving bench serve` process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

PROGRAM = [sys.executable, "-m", "pypto_serving"]


@dataclass(frozen=True)
class Workload:
    """One row of the table; `shared` prompt tokens are the same in every request."""

    name: str
    concurrency: int
    prompt: int
    output: int
    requests: int
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Return the tokens of all prompts and answers of a run with its warm-up. Shared ones count once."""
        return self.shared + (self.requests + 1) * (self.prompt + self.output)

    def arguments(self, seed: int, prompts: Path | None = None) -> list[str]:
        """Return the arguments of `bench serve`. `prompts` is a JSONL file that replaces random prompts."""
        common = ["--num-prompts", self.requests, "--max-concurrency", self.concurrency, "--num-warmups", 1]
        if prompts:
            shape = ["--dataset-name", "custom", "--dataset-path", prompts, "--custom-output-len", self.output]
        elif self.shared:
            shape = ["--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", 1]
            shape += ["--prefix-repetition-prefix-len", self.shared, "--prefix-repetition-suffix-len", self.prompt]
            shape += ["--prefix-repetition-output-len", self.output]
        else:
            shape = ["--random-input-len", self.prompt, "--random-output-len", self.output]
        return [str(value) for value in [*common, *shape, "--seed", seed]]


WORKLOADS = (
    Workload("W1", 1, 128, 128, 2),
    Workload("W2", 8, 128, 128, 8),
    Workload("W3", 32, 128, 64, 32),
    Workload("W4", 4, 2048, 8, 4),
    Workload("W5", 16, 64, 32, 16, shared=1024),
)
CONTROL_PLANE = Workload("T1", 64, 64, 128, 128)


@contextmanager
def server(model: Path, options: list[str]) -> Iterator[dict[str, Any]]:
    """Run a server and yield its ready line."""
    command = [*PROGRAM, "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.terminate()
        process.wait()


def measure(
    url: str, workload: Workload, seed: int, out: Path, options: Sequence[str] = (), prompts: Path | None = None
) -> dict[str, Any]:
    """Run a workload once, with further `options` of `bench serve`, and return the result file's content."""
    file = f"{workload.name}-{seed}.json"
    command = [*PROGRAM, "bench", "serve", "--base-url", url, *workload.arguments(seed, prompts), *options]
    command += ["--save-result", "--result-dir", str(out), "--result-filename", file]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads((out / file).read_text())
    if result["failed"]:
        raise SystemExit(f"{workload.name}: {result['failed']} requests failed; see {out / file}")
    return result


def row(workload: Workload, results: list[dict[str, Any]]) -> str:
    """Return medians over the runs as a line of a Markdown table."""

    def median(key: str) -> float:
        return statistics.median(result[key] for result in results)

    prompt_rate = median("total_token_throughput") - median("output_throughput")
    spread = [result["output_throughput"] for result in results]
    return (
        f"| {workload.name} | {median('output_throughput'):.1f} ({min(spread):.1f} to {max(spread):.1f}) "
        f"| {prompt_rate:.0f} | {median('median_ttft_ms'):.0f} | {median('median_itl_ms'):.1f} "
        f"| {median('p99_itl_ms'):.1f} |"
    )


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint for W1 to W5.")],
    tiny: Annotated[Path, typer.Option(help="Checkpoint for T1.")],
    out: Annotated[Path, typer.Option(help="Folder for the result files and table.md.")],
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each workload; the table shows medians.")] = 3,
) -> None:
    """Measure all workloads and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    lines = [
        "| workload | output tok/s (range) | prompt tok/s | median TTFT ms | median ITL ms | p99 ITL ms |",
        "|---|---|---|---|---|---|",
    ]
    ready = {}
    for folder, workloads in ((model, WORKLOADS), (tiny, (CONTROL_PLANE,))):
        with server(folder, []) as started:
            ready[folder.name] = started["ready_s"]
            runs: dict[str, list[dict[str, Any]]] = {workload.name: [] for workload in workloads}
            for seed in range(repeat):
                for workload in workloads:
                    typer.echo(f"{workload.name}, run {seed + 1} of {repeat}", err=True)
                    runs[workload.name].append(measure(started["url"], workload, seed, out))
            lines += [row(workload, runs[workload.name]) for workload in workloads]
    lines += ["", *(f"Ready after {seconds:.1f} s ({name})." for name, seconds in ready.items())]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
