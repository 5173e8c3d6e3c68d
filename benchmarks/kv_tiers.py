"""Measure gain and cost of KV tiers: restoring a prefix instead of computing it, and traffic without reuse.

    python benchmarks/kv_tiers.py --model DIR_06B --disk DIR          # an empty folder on the disk to measure

`restore`: the time to first token of a prompt of 2,048 + 1 tokens that is computed, then found on the device, in host
memory and on disk. The load speed from the server's metrics stands beside two plain ones in pieces of a block: a memcpy
of as many bytes, and O_DIRECT reads of the same file by as many threads.

`overhead`: requests that share nothing, alternating between a server without tiers and one that stores every block in
host memory and on disk. The ratios are medians over pairs, of CPU time per output token and of wall time.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import typer
import workloads
from compare_machine import pause, resume, tree
from workloads import PROGRAM

PREFIX = 2048
LOADERS = 4
"""Threads that load from disk."""


@dataclass
class Server:
    """A running server, with tiers or without."""

    pid: int
    http: httpx.Client
    tiered: bool

    @property
    def cpu_s(self) -> float:
        """Return the CPU time of all of its processes."""
        return sum(stat.cpu_s for stat in tree(self.pid))

    def metrics(self, name: str) -> dict[str, float]:
        """Return a metric of each tier."""
        found = re.findall(
            rf'^pypto:kv_tier_({name}){{[^}}]*tier="(\w+)"}} (\S+)$', self.http.get("/metrics").text, re.M
        )
        assert found, f"no metric {name}"
        return {f"{metric} {tier}": float(value) for metric, tier, value in found}

    def metric(self, name: str, tier: str) -> float:
        return self.metrics(name)[f"{name} {tier}"]

    def settle(self, poll_s: float = 0.1) -> None:
        """Wait until no block is queued for a tier. Reading the metrics costs the server some ms of CPU time."""
        while any(self.metrics("queued_bytes|backlog_blocks").values()):
            time.sleep(poll_s)

    def forget(self, *tiers: str) -> None:
        self.http.post("/reset_prefix_cache", params=[("tier", tier) for tier in tiers]).raise_for_status()

    def first_token_s(self, prompt: Sequence[int]) -> tuple[float, dict[str, int]]:
        """Send a prompt. Return its time to first token and its cached tokens by tier."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        started_s, first_s, usage = time.perf_counter(), 0.0, {}
        options = {"stream_options": {"include_usage": True}}
        with self.http.stream("POST", "/v1/completions", json={**body, **options}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.perf_counter() - started_s
                    usage = msgspec.json.decode(line[6:]).get("usage") or usage
        return first_s, usage["prompt_tokens_details"]["cached_tokens_by_tier"]


@contextmanager
def server(model: Path, *options: str) -> Iterator[Server]:
    """Run our server with these options during the block."""
    with workloads.server(model, list(options)) as ready, httpx.Client(base_url=ready["url"], timeout=600) as http:
        yield Server(ready["pid"], http, bool(options))


def gigabytes_per_s(num_bytes: float, work: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    work()
    return num_bytes / (time.perf_counter() - started_s) / 1e9


class Copies:
    """memcpy of blocks between two memory regions."""

    def __init__(self, block_bytes: int, count: int) -> None:
        size = block_bytes * count
        self.here, self.there = (np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8) for _ in range(2))
        self.here[:], self.there[:] = 1, 2
        self.block_bytes, self.size = block_bytes, size

    def run(self) -> None:
        for start in range(0, self.size, self.block_bytes):
            part = slice(start, start + self.block_bytes)
            np.copyto(self.here[part], self.there[part])


class Reads:
    """Plain O_DIRECT reads of the first blocks of a file, in a pool of threads."""

    def __init__(self, file: Path, block_bytes: int, count: int) -> None:
        self.memory = memoryview(mmap.mmap(-1, block_bytes * count))
        self.memory[:: mmap.PAGESIZE] = bytes(len(self.memory) // mmap.PAGESIZE)
        self.file = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self.block_bytes, self.count = block_bytes, count
        self.pool = ThreadPoolExecutor(LOADERS)

    def run(self) -> None:
        list(self.pool.map(self._read, range(self.count)))

    def _read(self, block: int) -> None:
        start = block * self.block_bytes
        done = os.preadv(self.file, [self.memory[start : start + self.block_bytes]], start)
        assert done == self.block_bytes


def largest_file(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def restore(model: Path, disk: Path, rounds: int) -> Iterator[str]:
    """Measure and yield lines of a table."""
    rng = random.Random(1)
    times: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with server(model, "--kv-host-memory", "2GiB", "--kv-disk", str(disk), "--kv-disk-size", "4GiB") as ours:
        ours.first_token_s(rng.choices(range(1000), k=64))
        for number in range(rounds):
            prompt = rng.choices(range(1000), k=PREFIX + 1)
            for tier, drop in (("computed", ()), ("device", ()), ("host", ("device",)), ("disk", ("device", "host"))):
                if drop:
                    ours.settle()
                    ours.forget(*drop)
                before = (
                    {name: ours.metric(name, tier) for name in ("loaded_bytes_total", "load_seconds_total")}
                    if (drop)
                    else {}
                )
                seconds, sources = ours.first_token_s(prompt)
                assert tier == "computed" or sources[tier] == PREFIX, sources
                times.setdefault(tier, []).append(seconds)
                if drop:
                    loaded, took = (ours.metric(name, tier) - value for name, value in before.items())
                    rates.setdefault(tier, []).append(loaded / took / 1e9)
            if number == 0:
                count = int(ours.metric("stored_blocks_total", "disk"))
                block = int(ours.metric("stored_bytes_total", "disk")) // count
                copies = Copies(block, PREFIX // 32)
                reads = Reads(largest_file(disk), block, PREFIX // 32)
            rates.setdefault("memcpy", []).append(gigabytes_per_s(copies.size, copies.run))
            rates.setdefault("O_DIRECT", []).append(gigabytes_per_s(copies.size, reads.run))
    yield "| prefix of 2,048 tokens | median TTFT ms | speedup over computing | load GB/s | plain GB/s | of plain |"
    yield "|---|---|---|---|---|---|"
    computed = statistics.median(times["computed"])
    for tier, seconds in times.items():
        plain = {"host": "memcpy", "disk": "O_DIRECT"}.get(tier)
        speed = ["", "", ""]
        if plain:
            mine, theirs = statistics.median(rates[tier]), statistics.median(rates[plain])
            speed = [f"{mine:.2f}", f"{plain} {theirs:.2f}", f"{mine / theirs:.0%}"]
        middle = statistics.median(seconds)
        yield f"| {tier} | {middle * 1e3:.0f} | {computed / middle:.0f}x | {' | '.join(speed)} |"


def drive(ours: Server, seed: int, shape: tuple[int, int, int, int], out: Path) -> tuple[float, float]:
    """Send requests that share nothing. Return the server's CPU seconds per output token and the wall time."""
    requests, concurrency, prompt, output = map(str, shape)
    command = [*PROGRAM, "bench", "serve", "--base-url", str(ours.http.base_url), "--num-prompts", requests]
    command += ["--max-concurrency", concurrency, "--random-input-len", prompt, "--random-output-len", output]
    command += ["--seed", str(seed), "--num-warmups", "0", "--save-result", "--result-dir", str(out)]
    before = ours.cpu_s
    subprocess.run(
        [*command, "--result-filename", "run.json"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if ours.tiered:
        ours.settle(poll_s=0.5)
    used = ours.cpu_s - before
    result = msgspec.json.decode((out / "run.json").read_bytes())
    assert not result["failed"]
    return used / result["total_output_tokens"], result["duration"]


def overhead(model: Path, disk: Path, pairs: int, shape: tuple[int, int, int, int], out: Path) -> Iterator[str]:
    """Measure and yield lines of a table."""
    results: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    options = ("--kv-host-memory", "1GiB", "--kv-disk", str(disk), "--kv-disk-size", "4GiB")
    with server(model) as without, server(model, *options) as tiered:
        servers = {"without": without, "with": tiered}
        for ours in servers.values():
            drive(ours, 0, shape, out)
        for number in range(pairs):
            names = list(servers) if number % 2 else list(servers)[::-1]
            for name in names:
                other = next(ours for key, ours in servers.items() if key != name)
                pause(other.pid)
                results[name].append(drive(servers[name], number + 1, shape, out))
                resume(other.pid)
    yield "| requests x at once, prompt + output | CPU ms per token without | with | ratio | wall time ratio |"
    yield "|---|---|---|---|---|"
    cpu = [w[0] / o[0] for w, o in zip(results["with"], results["without"], strict=True)]
    wall = [w[1] / o[1] for w, o in zip(results["with"], results["without"], strict=True)]
    middle = {name: statistics.median(cpu_s for cpu_s, _ in runs) * 1e3 for name, runs in results.items()}
    yield (
        f"| {shape[0]} x {shape[1]}, {shape[2]} + {shape[3]} | {middle['without']:.3f} | {middle['with']:.3f} "
        f"| {statistics.median(cpu):.3f} ({min(cpu):.3f} to {max(cpu):.3f}) "
        f"| {statistics.median(wall):.3f} ({min(wall):.3f} to {max(wall):.3f}) |"
    )


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint in the shape of Qwen3-0.6B.")],
    disk: Annotated[Path, typer.Option(help="Empty folder on the disk to measure.")],
    rounds: Annotated[int, typer.Option(min=0)] = 3,
    pairs: Annotated[int, typer.Option(min=0)] = 7,
    out: Annotated[Path, typer.Option(help="Folder for result files.")] = Path("runs/kv_tiers"),
) -> None:
    """Measure both and print the tables."""
    out.mkdir(parents=True, exist_ok=True)
    if rounds:
        for line in restore(model, disk / "restore", rounds):
            typer.echo(line)
        typer.echo()
    if pairs:
        for line in overhead(model, disk / "overhead", pairs, (16, 8, 128, 32), out):
            typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
