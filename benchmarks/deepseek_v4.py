"""Measure W1 to W3 on a DeepSeek V4 checkpoint, and the share of the bandwidth limit that one stream reaches.

    python benchmarks/make_checkpoint.py deepseek-v4-1b /tmp/deepseek-v4-1b
    python benchmarks/deepseek_v4.py --model /tmp/deepseek-v4-1b

A token reads all weights except the embedding and the experts that it does not choose. At batch 1, bandwidth divided
by those bytes is the limit in tokens per second. The bandwidth is measured before and after each run.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated

import typer
from compare import Reader
from workloads import WORKLOADS, measure, server

from pypto_serving.model.deepseek_v4.config import DeepseekV4Config
from pypto_serving.model.deepseek_v4.inventory import model_tensors
from pypto_serving.model.registry import load_config


def active_bytes(model: DeepseekV4Config) -> float:
    """Return the bytes of weights that a token reads in the kernels: routers and vectors in float32."""
    share = model.experts.per_token / model.experts.count
    total = 0.0
    for name, tensor in model_tensors(model).items():
        if name == "embed.weight" or tensor.role == "ids":
            continue
        wide = tensor.role == "float" or name.endswith("ffn.gate.weight")
        total += tensor.count * (4 if wide else 2) * (share if ".experts." in name else 1)
    return total


def main(
    model: Annotated[Path, typer.Option(help="DeepSeek V4 checkpoint in bfloat16.")],
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path, typer.Option(help="Folder for result files.")] = Path("runs/deepseek_v4"),
) -> None:
    """Measure and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    read_bytes, reader = active_bytes(load_config(str(model))[1]), Reader()
    typer.echo(f"a token reads {read_bytes / 1e6:.0f} MB of weights\n")
    typer.echo("| workload | output tok/s | median TTFT ms | median ITL ms | GB/s | share of the bandwidth limit |")
    typer.echo("|---|---|---|---|---|---|")
    with server(model, []) as ready:
        for workload in WORKLOADS[:3]:
            results, speeds, parts = [], [], []
            for seed in range(rounds):
                before = reader.bandwidth()
                results.append(measure(ready["url"], workload, seed, out))
                speeds.append((before + reader.bandwidth()) / 2)
                parts.append(1e3 / results[-1]["median_itl_ms"] / (speeds[-1] / read_bytes))
            tokens, ttft, itl = (
                statistics.median(result[key] for result in results)
                for key in ("output_throughput", "median_ttft_ms", "median_itl_ms")
            )
            part = f"{statistics.median(parts):.0%} ({min(parts):.0%} to {max(parts):.0%})"
            typer.echo(
                f"| {workload.name} | {tokens:.1f} | {ttft:.0f} | {itl:.1f} | {statistics.median(speeds) / 1e9:.0f} "
                f"| {part if workload.concurrency == 1 else ''} |"
            )


if __name__ == "__main__":
    typer.run(main)
