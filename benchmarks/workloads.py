"""Run the standard workloads on our own server and print a table.

    python benchmarks/workloads.py --model DIR --repeat 3                # W1 to W5
    python benchmarks/workloads.py --model TINY --only T1
    python benchmarks/workloads.py --model DIR_14B --only W1 --cold      # read from disk at the start

| workload | requests at once | prompt tokens           | output tokens | measures       |
|----------|------------------|-------------------------|---------------|----------------|
| W1       | 1                | 128                     | 128           | single stream  |
| W2       | 8                | 128                     | 128           | small batch    |
| W3       | 32               | 128                     | 64            | large batch    |
| W4       | 4                | 2,048                   | 8             | prefill        |
| W5       | 16               | 1,024 shared + 64 own   | 32            | prefix cache   |
| T1       | 64 (tiny model)  | 64                      | 128           | control plane  |

Greedy, ignore_eos, prompts of fresh random token ids. Every run is one `pypto-serving bench serve` process. The share
is that of the read bandwidth, measured before and after a run, which the weights of a single stream's tokens take.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from peers import Checkpoint, Ours
from rounds import head, row, seconds, spread
from servers import PROGRAM, BandwidthReader, ServerError, running

GIB = 1 << 30


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

    def arguments(self, seed: int) -> list[str]:
        """Return the arguments of `bench serve`."""
        common = ["--num-prompts", self.requests, "--max-concurrency", self.concurrency, "--num-warmups", 1]
        if self.shared:
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
BY_NAME = {workload.name: workload for workload in (*WORKLOADS, CONTROL_PLANE)}


def measure(url: str, workload: Workload, seed: int, out: Path, options: Sequence[str] = ()) -> dict[str, Any]:
    """Run a workload once, with further `options` of `bench serve`. Raises ServerError if a request fails."""
    file = out / f"{workload.name}-{seed}.json"
    command = [*PROGRAM, "bench", "serve", "--base-url", url, *workload.arguments(seed), *options]
    command += ["--save-result", "--result-dir", str(out), "--result-filename", file.name]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(file.read_text())
    if result["failed"]:
        raise ServerError(f"{workload.name}: {result['failed']} requests failed; see {file}")
    return result


def measure_share(url: str, workload: Workload, seed: int, out: Path, token_bytes: int) -> dict[str, Any]:
    """Run a workload, and add the bandwidth and the share of it that a single stream takes."""
    reader = BandwidthReader()
    before = reader.bytes_per_s()
    result = measure(url, workload, seed, out)
    bandwidth = (before + reader.bytes_per_s()) / 2
    return result | {"bandwidth": bandwidth, "share": token_bytes * 1e3 / result["median_itl_ms"] / bandwidth}


def cells(workload: Workload, results: Sequence[dict[str, Any]]) -> list[str]:
    """Return medians over the runs as a line of the table."""

    def median(key: str) -> float:
        return statistics.median(result[key] for result in results)

    prompt_rate = median("total_token_throughput") - median("output_throughput")
    share = f"{median('share'):.0%}" if workload.concurrency == 1 else ""
    latencies = (f"{median('median_ttft_ms'):.0f}", f"{median('median_itl_ms'):.1f}", f"{median('p99_itl_ms'):.1f}")
    rates = (spread([result["output_throughput"] for result in results], 1), f"{prompt_rate:.0f}")
    return [workload.name, *rates, *latencies, f"{median('bandwidth') / 1e9:.0f}", share]


def forget_pages(folders: Sequence[Path]) -> None:
    """Drop the files of folders from the page cache."""
    for file in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files(folder: Path) -> None:
    """Read all files of a folder."""
    buffer = bytearray(16 << 20)
    for file in (path for path in folder.rglob("*") if path.is_file()):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint to serve.")],
    only: Annotated[str, typer.Option(help="Workloads, comma-separated.")] = "W1,W2,W3,W4,W5",
    out: Annotated[Path, typer.Option(help="Folder for the result files.")] = Path("runs/workloads"),
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each workload; the table shows medians.")] = 3,
    cold: Annotated[bool, typer.Option("--cold", help="Time a reading of the files, and start from disk.")] = False,
) -> None:
    """Measure the workloads and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    launch = Ours().launch(Checkpoint(model), Path())
    if cold:
        forget_pages([model])
        typer.echo(f"Reading the files takes {seconds(lambda: read_files(model)):.1f} s.")
        forget_pages([model])
    headings = ("workload", "output tok/s (range)", "prompt tok/s", "median TTFT ms", "median ITL ms", "p99 ITL ms")
    with running(launch, out / "server.log") as server:
        typer.echo(f"{head(*headings, 'read GB/s', 'share')}")
        for workload in (BY_NAME[name] for name in only.split(",")):
            runs = range(repeat)
            results = [measure_share(server.url, workload, seed, out, launch.token_bytes) for seed in runs]
            typer.echo(row(*cells(workload, results)))
        memory = server.memory()
    peak, resident = memory["peak"] / GIB, memory["resident"] / GIB
    typer.echo(f"\nReady after {server.ready_s:.1f} s; a token reads {launch.token_bytes / 1e9:.3f} GB of weights.")
    typer.echo(f"Memory of all processes: peak {peak:.2f} GiB, resident {resident:.2f} GiB.")


if __name__ == "__main__":
    typer.run(main)
