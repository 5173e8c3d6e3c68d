"""Measure gain and cost of KV tiers, on a checkpoint in the shape of Qwen3-0.6B and an empty folder on the disk.

    python benchmarks/tiers.py restore --model DIR --disk DIR
    python benchmarks/tiers.py overhead --model DIR --disk DIR
    python benchmarks/tiers.py compare --model DIR --disk DIR          # installs vLLM as compare.py does

- restore: the time to first token of a prompt of 2,048 + 1 tokens that is computed, then found on the device, in host
  memory and on disk. The load speed of the server's metrics stands beside a memcpy of as many bytes in pieces of a
  block, and O_DIRECT reads of the same file by as many threads.
- overhead: requests that share nothing, in turns on a server without tiers and on one that stores every block in host
  memory and on disk. The ratios are over pairs, of CPU time per output token and of wall time.
- compare: our server with and without a disk tier and vLLM on a working set of four times the KV memory. Every server
  has 1 GiB for keys and values, 9,362 tokens. 18 prefixes of 2,048 tokens, each with 32 tokens of its own, are sent two
  at a time: once uncounted, then in each round in a new random order. vLLM keeps blocks on the device only: its
  offloading to host memory refuses to start on a CPU, and LMCache needs CUDA.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import numpy as np
import typer
from peers import OURS, Checkpoint, Ours, Vllm
from rounds import head, in_turns, ratios, row, seconds, spread
from servers import PROGRAM, Request, Server, ask_all, elapsed_s, pause, resume, running, served, tree_cpu_s
from workloads import Workload, measure

from pypto_serving.bench.metrics import RequestRecord

PREFIX, BLOCK = 2048, 32
LOADERS = 4
"""Threads that load from disk."""
PREFIXES, OWN, OUTPUT, AT_ONCE = 18, 32, 16, 2
ALONE = Workload("alone", 8, 128, 32, 16)

app = typer.Typer(help="Measure KV tiers.")
Model = Annotated[Path, typer.Option(help="Checkpoint in the shape of Qwen3-0.6B.")]
Disk = Annotated[Path, typer.Option(help="Empty folder on the disk to measure.")]


class TieredServer:
    """A client of a running server that reads its metrics of tiers."""

    def __init__(self, pid: int, url: str, tiered: bool) -> None:
        self.pid, self.url, self.tiered = pid, url, tiered
        self.http = httpx.Client(base_url=url, timeout=600)

    def metrics(self, name: str) -> dict[str, float]:
        """Return a metric of each tier, as `NAME TIER`."""
        pattern = rf'^pypto:kv_tier_({name}){{[^}}]*tier="(\w+)"}} (\S+)$'
        found = re.findall(pattern, self.http.get("/metrics").text, re.M)
        assert found, f"no metric {name}"
        return {f"{metric} {tier}": float(value) for metric, tier, value in found}

    def settle(self) -> None:
        """Wait until no block is queued for a tier. Reading the metrics costs the server some ms of CPU time."""
        while self.tiered and any(self.metrics("queued_bytes|backlog_blocks").values()):
            time.sleep(0.5)


@contextmanager
def tiered(model: Path, *options: str) -> Iterator[TieredServer]:
    """Run our server with these options of tiers, or without tiers, during the block."""
    with served([*PROGRAM, "serve", str(model), *options]) as ready:
        yield TieredServer(ready["pid"], ready["url"], bool(options))


class PlainMoves:
    """memcpy of blocks between two memory regions, and O_DIRECT reads of the first blocks of a file."""

    def __init__(self, folder: Path, block_bytes: int, count: int) -> None:
        self._blocks = [slice(i * block_bytes, (i + 1) * block_bytes) for i in range(count)]
        self.size = block_bytes * count
        self._memory = memoryview(mmap.mmap(-1, self.size))
        self._here = np.frombuffer(self._memory, np.uint8)
        self._there = np.frombuffer(mmap.mmap(-1, self.size), np.uint8)
        self._here[:], self._there[:] = 1, 2
        file = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        self._file = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self._pool = ThreadPoolExecutor(LOADERS)

    def copy(self) -> None:
        """Copy all blocks, one after the other."""
        for block in self._blocks:
            np.copyto(self._here[block], self._there[block])

    def read(self) -> None:
        """Read all blocks in LOADERS threads."""
        list(self._pool.map(lambda block: os.preadv(self._file, [self._memory[block]], block.start), self._blocks))


@app.command()
def restore(model: Model, disk: Disk, rounds: Annotated[int, typer.Option(min=1)] = 3) -> None:
    """Measure prefixes that are computed, and found in each tier."""
    rng, plain = random.Random(1), None
    times: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with tiered(model, "--kv-host-memory", "2GiB", "--kv-disk", str(disk), "--kv-disk-size", "4GiB") as server:
        ask_all(server.url, [Request(rng.choices(range(1000), k=64), 1)])
        for _ in range(rounds):
            prompt = rng.choices(range(1000), k=PREFIX + 1)
            for tier, drop in (("computed", ()), ("device", ()), ("host", ("device",)), ("disk", ("device", "host"))):
                if drop:
                    server.settle()
                    server.http.post("/reset_prefix_cache", params=[("tier", each) for each in drop])
                before = server.metrics("loaded_bytes_total|load_seconds_total") if drop else {}
                (record,) = ask_all(server.url, [Request(prompt, 1)])
                assert tier == "computed" or record.cached_by_tier[tier] == PREFIX, record
                times.setdefault(tier, []).append(record.ttft_s or 0.0)
                if drop:
                    after = server.metrics("loaded_bytes_total|load_seconds_total")
                    names = (f"loaded_bytes_total {tier}", f"load_seconds_total {tier}")
                    loaded, took_s = (after[name] - before[name] for name in names)
                    rates.setdefault(tier, []).append(loaded / took_s / 1e9)
            if plain is None:
                stored = server.metrics("stored_blocks_total|stored_bytes_total")
                block_bytes = stored["stored_bytes_total disk"] / stored["stored_blocks_total disk"]
                plain = PlainMoves(disk, int(block_bytes), PREFIX // BLOCK)
            rates.setdefault("memcpy", []).append(plain.size / seconds(plain.copy) / 1e9)
            rates.setdefault("O_DIRECT", []).append(plain.size / seconds(plain.read) / 1e9)
    typer.echo(
        head("prefix of 2,048 tokens", "median TTFT ms", "over computing", "load GB/s", "plain GB/s", "of plain")
    )
    for tier, found in times.items():
        middle, speed = statistics.median(found), ["", "", ""]
        if name := {"host": "memcpy", "disk": "O_DIRECT"}.get(tier):
            mine, theirs = statistics.median(rates[tier]), statistics.median(rates[name])
            speed = [f"{mine:.2f}", f"{name} {theirs:.2f}", f"{mine / theirs:.0%}"]
        typer.echo(row(tier, f"{middle * 1e3:.0f}", f"{statistics.median(times['computed']) / middle:.0f}x", *speed))


class Cost(NamedTuple):
    """What a run cost: CPU seconds of the server per output token, and its wall time."""

    cpu_s: float
    wall_s: float


def drive(server: TieredServer, seed: int, out: Path) -> Cost:
    """Send requests that share nothing; wait until their blocks are stored."""
    before_s = tree_cpu_s(server.pid)
    result = measure(server.url, ALONE, seed, out)
    server.settle()
    return Cost((tree_cpu_s(server.pid) - before_s) / result["total_output_tokens"], result["duration"])


@app.command()
def overhead(
    model: Model,
    disk: Disk,
    pairs: Annotated[int, typer.Option(min=2)] = 7,
    out: Annotated[Path, typer.Option(help="Folder for result files.")] = Path("runs/tiers"),
) -> None:
    """Measure what storing costs where nothing is used again."""
    out.mkdir(parents=True, exist_ok=True)
    options = ("--kv-host-memory", "1GiB", "--kv-disk", str(disk), "--kv-disk-size", "4GiB")
    found: tuple[list[Cost], list[Cost]] = ([], [])
    with tiered(model) as without, tiered(model, *options) as storing:
        servers = (without, storing)
        for server in servers:
            drive(server, 0, out)
        for number, which in in_turns((0, 1), pairs):
            pause(servers[1 - which].pid)
            found[which].append(drive(servers[which], number + 1, out))
            resume(servers[1 - which].pid)
    cpu = [[cost.cpu_s for cost in costs] for costs in found]
    wall = [[cost.wall_s for cost in costs] for costs in found]
    typer.echo(head("CPU ms per token without", "with", "ratio", "wall time ratio"))
    middle = (f"{statistics.median(costs) * 1e3:.3f}" for costs in cpu)
    typer.echo(row(*middle, spread(ratios(cpu[1], cpu[0]), 3), spread(ratios(wall[1], wall[0]), 3)))


def requests(vocab_size: int, order: Sequence[int], seed: int) -> list[Request]:
    """Return a request for each prefix in `order`. Prefixes are always the same; `seed` determines other tokens."""
    own, ids = random.Random(seed), range(vocab_size)
    return [Request(random.Random(number).choices(ids, k=PREFIX) + own.choices(ids, k=OWN), OUTPUT) for number in order]


@app.command()
def compare(
    model: Model,
    disk: Disk,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    environments: Annotated[Path, typer.Option(help="Folder to install peers into.")] = Path("~/.cache/pypto-peers"),
    out: Annotated[Path, typer.Option(help="Folder of logs.")] = Path("runs/tiers"),
) -> None:
    """Measure a working set of four times the KV memory, beside vLLM."""
    checkpoint, root, vllm = Checkpoint(model), environments.expanduser(), Vllm()
    vllm.prepare(root)
    mine = Ours().launch(checkpoint, root).with_flags("--kv-memory", "1GiB")
    theirs = vllm.launch(checkpoint, root).with_flags("--enable-prompt-tokens-details", VLLM_CPU_KVCACHE_SPACE="1")
    with_disk = mine.with_flags("--kv-disk", str(disk))
    vocab_size, servers = int(checkpoint.config["vocab_size"]), dict[str, Server]()
    passes: dict[str, list[list[RequestRecord]]] = {}
    with ExitStack() as stack:
        for name, launch in ((f"{OURS}, disk tier", with_disk), (OURS, mine), (vllm.title, theirs)):
            servers[name] = stack.enter_context(running(launch, out / f"{len(servers)}.log"))
            ask_all(servers[name].url, requests(vocab_size, range(PREFIXES), 0), AT_ONCE)
            servers[name].pause()
        for number, name in in_turns(list(servers), rounds):
            order = random.Random(number).sample(range(PREFIXES), PREFIXES)
            servers[name].resume()
            found = ask_all(servers[name].url, requests(vocab_size, order, number + 1), AT_ONCE)
            servers[name].pause()
            passes.setdefault(name, []).append(found)
    typer.echo(
        head("server", "output tok/s", "prompt tok/s", "median TTFT ms", "cached", "tok/s (rounds)", "TTFT (rounds)")
    )
    total = PREFIXES * (PREFIX + OWN)
    times_s = {name: [elapsed_s(records) for records in runs] for name, runs in passes.items()}
    ttfts_s = {name: [statistics.median(r.ttft_s or 0.0 for r in run) for run in runs] for name, runs in passes.items()}
    first = f"{OURS}, disk tier"
    for name, runs in passes.items():
        took_s, ttft_s = statistics.median(times_s[name]), statistics.median(ttfts_s[name])
        cached = statistics.median(sum(record.cached_tokens or 0 for record in run) for run in runs) / total
        rates = (f"{PREFIXES * OUTPUT / took_s:.1f}", f"{total / took_s:.0f}", f"{1e3 * ttft_s:.0f}", f"{cached:.0%}")
        speed, ttft = ratios(times_s[name], times_s[first]), ratios(ttfts_s[first], ttfts_s[name])
        typer.echo(row(name, *rates, spread(speed, 1), spread(ttft, 3)))


if __name__ == "__main__":
    app()
