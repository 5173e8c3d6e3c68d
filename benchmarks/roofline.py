"""Measure what this machine can do at best, and how much of it each kernel and each whole step reaches.

    python benchmarks/roofline.py --quick
    python benchmarks/roofline.py --only attend
    python benchmarks/roofline.py --model DIR_06B                        # whole steps too; alone with --only none

Kernels are measured in the shape of Qwen3-0.6B, experts in that of Qwen3-30B-A3B, with random weights and caches that
take turns, so that they come from memory. The limits are measured before, between and after the groups of cases, for
other tenants of the machine come and go. docs/benchmarks.md says how to read the tables.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import roofline_report as report
import rounds
from roofline_kernels import Bench, Result, groups
from roofline_limits import BandwidthMemory
from roofline_report import Ceilings, Rated
from roofline_steps import Steps, batches

from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine
from pypto_serving.setup.host import read_host_facts
from pypto_serving.types.config import Head

CASE_S, QUICK_CASE_S = 0.5, 0.1
ROUND_BYTES = 256 << 20
"""Read between the rounds of a case to know the bandwidth of the moment."""


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint whose whole steps are measured too.")] = None,
    head: Annotated[
        Head, typer.Option(help="int8: round the checkpoint's output layer, as `serve --head` does.")
    ] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases in less than a minute.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as CPUs.")] = 0,
    kernels: Annotated[str, typer.Option(help="Instruction set; by default the best.")] = "",
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this, such as attend.")] = "",
) -> None:
    """Measure the machine, its kernels and whole steps, and print the tables."""
    threads = threads or read_host_facts().num_cpus
    engine, single, memory, ceilings = Engine(kernels, threads), Engine(kernels, 1), BandwidthMemory(), Ceilings()
    bench = Bench(engine, QUICK_CASE_S if quick else CASE_S, BandwidthMemory(ROUND_BYTES))
    alone: list[Result] = []
    for group in groups(quick):
        if only in group.name:
            typer.echo(group.name, err=True)
            ceilings.measure(memory, engine, single)
            run = group.prepare(bench)
            for case in group.cases:
                alone += run(case)
            del run
    whole: list[Result] = []
    tokens: dict[str, int] = {}
    steps = Steps(model, engine.instruction_set, threads, batches(quick), head) if model else None
    for batch in steps.batches if steps else ():
        typer.echo(batch.shape, err=True)
        ceilings.measure(memory, engine, single)
        whole += steps.measure(batch, bench)
        tokens[batch.shape] = batch.tokens
    ceilings.measure(memory, engine, single)
    rated, in_steps = ([Rated.of(one, ceilings) for one in results] for results in (alone, whole))
    for rows in (report.kernel_table(rated), report.step_table(in_steps), report.speed_table(in_steps, tokens)):
        if len(rows) > 1:
            typer.echo(f"{rounds.table(rows)}\n")
    typer.echo("\n".join([f"{engine.instruction_set}, {threads} threads", *ceilings.lines()]))


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigError as error:
        sys.exit(f"error: {error}")
