"""Compare our server with and without a disk tier and vLLM on a working set of four times the KV memory.

    python benchmarks/compare_tiers.py --model DIR_06B --disk DIR      # an empty folder; about a quarter of an hour

Every server has 1 GiB for keys and values: 9,362 tokens of Qwen3-0.6B's shape in bf16. The prompts have 18 prefixes of
2,048 tokens and 32 tokens of their own, and are sent two at a time. A first pass is not counted. Each round then sends
all prefixes again, in a new random order that is the same for every server. Servers not being measured are stopped.

vLLM keeps blocks on the device only: its offloading to host memory refuses to start on a CPU, and LMCache needs CUDA.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import compare_latency
import typer
from compare_peers import OURS, Checkpoint, Ours, Vllm
from compare_servers import Launch, PeerError, Server, running

from pypto_serving.bench.client import find_model
from pypto_serving.bench.metrics import RequestRecord
from pypto_serving.bench.options import Target

PREFIXES, PREFIX, OWN, OUTPUT, AT_ONCE = 18, 2048, 32, 16, 2
DISK = f"{OURS}, disk tier"


@dataclass(frozen=True)
class Pass:
    """One request per prefix: wall time, median time to first token, and cached prompt tokens."""

    seconds: float
    ttft_s: float
    cached_tokens: int

    @classmethod
    def of(cls, records: Sequence[RequestRecord], seconds: float) -> Pass:
        """Summarize records. Raises PeerError if a request failed."""
        if errors := [record.error for record in records if record.error]:
            raise PeerError(f"a request failed: {errors[0]}")
        ttft_s = statistics.median(record.ttft_s for record in records)
        return cls(seconds, ttft_s, sum(record.cached_tokens or 0 for record in records))


def prompts(vocab_size: int, order: Sequence[int], seed: int) -> list[list[int]]:
    """Return a prompt for each prefix in `order`. Prefixes are always the same; `seed` determines the other tokens."""
    own = random.Random(seed)
    return [
        random.Random(number).choices(range(vocab_size), k=PREFIX) + own.choices(range(vocab_size), k=OWN)
        for number in order
    ]


async def ask(url: str, contents: Sequence[Sequence[int]]) -> Pass:
    """Send the prompts in order, AT_ONCE at a time."""
    target = Target(base_url=url)
    client = compare_latency.Client(target, (await find_model(target)).id)
    waiting = iter(contents)
    records: list[RequestRecord] = []

    async def send() -> None:
        for content in waiting:
            records.append(await client.stream(content, OUTPUT))

    started_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(send())
    seconds = time.perf_counter() - started_s
    client.close()
    return Pass.of(records, seconds)


def with_flags(launch: Launch, *flags: str, **environment: str) -> Launch:
    """Add flags and environment variables to a launch."""
    return replace(
        launch,
        arguments=lambda port: [*launch.arguments(port), *flags],
        environment={**launch.environment, **environment},
    )


def launches(checkpoint: Checkpoint, environments: Path, disk: Path) -> dict[str, Launch]:
    """Return the servers to launch. Install vLLM if it is missing."""
    vllm = Vllm()
    vllm.prepare(environments, typer.echo)
    mine = with_flags(Ours().launch(checkpoint), "--kv-memory", "1GiB")
    theirs = with_flags(vllm.launch(checkpoint), "--enable-prompt-tokens-details", VLLM_CPU_KVCACHE_SPACE="1")
    return {DISK: with_flags(mine, "--kv-disk", str(disk)), OURS: mine, vllm.title: theirs}


def table(passes: dict[str, list[Pass]]) -> Iterator[str]:
    """Yield medians over the rounds, and ratios of the server with the disk tier over each, with their range."""
    yield "| server | output tok/s | prompt tok/s | median TTFT ms | cached | tok/s (rounds) | TTFT (rounds) |"
    yield "|---|---|---|---|---|---|---|"
    prompt_tokens = PREFIXES * (PREFIX + OWN)
    for name, runs in passes.items():
        seconds = statistics.median(run.seconds for run in runs)
        cached = statistics.median(run.cached_tokens for run in runs) / prompt_tokens
        pairs = list(zip(passes[DISK], runs, strict=True))
        speed = [theirs.seconds / mine.seconds for mine, theirs in pairs]
        ttft = [mine.ttft_s / theirs.ttft_s for mine, theirs in pairs]
        yield (
            f"| {name} | {PREFIXES * OUTPUT / seconds:.1f} | {prompt_tokens / seconds:.0f} "
            f"| {1e3 * statistics.median(run.ttft_s for run in runs):.0f} | {cached:.0%} "
            f"| {statistics.median(speed):.1f} ({min(speed):.1f} to {max(speed):.1f}) "
            f"| {statistics.median(ttft):.3f} ({min(ttft):.3f} to {max(ttft):.3f}) |"
        )


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint in the shape of Qwen3-0.6B.")],
    disk: Annotated[Path, typer.Option(help="Empty folder on the disk of the tier.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    environments: Annotated[Path, typer.Option(help="Folder to install peers into.")] = Path("~/.cache/pypto-peers"),
    out: Annotated[Path, typer.Option(help="Folder of logs.")] = Path("runs/compare_tiers"),
) -> None:
    """Measure and print the table."""
    checkpoint = Checkpoint(model)
    vocab_size = int(checkpoint.config["vocab_size"])
    servers: dict[str, Server] = {}
    passes: dict[str, list[Pass]] = {}
    with ExitStack() as stack:
        for number, (name, launch) in enumerate(launches(checkpoint, environments.expanduser(), disk).items()):
            servers[name] = stack.enter_context(running(launch, out / f"{number}.log"))
            asyncio.run(ask(servers[name].url, prompts(vocab_size, range(PREFIXES), 0)))
            servers[name].pause()
        for number in range(rounds):
            order = random.Random(number).sample(range(PREFIXES), PREFIXES)
            for name, server in servers.items():
                server.resume()
                run = asyncio.run(ask(server.url, prompts(vocab_size, order, number + 1)))
                server.pause()
                typer.echo(f"round {number + 1}, {name}: {run}", err=True)
                passes.setdefault(name, []).append(run)
    typer.echo("\n".join(table(passes)))


if __name__ == "__main__":
    typer.run(main)
