"""What this machine can do at best, and how much of it each kernel and each whole step reaches.

    python benchmarks/roofline.py --quick
    python benchmarks/roofline.py --torch --model DIR_06B --out runs/roofline

Kernels are measured in the shape of Qwen3-0.6B, experts in that of Qwen3-30B-A3B, with random weights and caches that
take turns, so that they come from memory. The limits are measured before, between and after the groups of cases, for
other tenants of the machine come and go. docs/benchmarks.md says how to read the tables.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import pypto_serving.model.openmp  # noqa: F401

# isort: split
import roofline_quantized
import roofline_report as report
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from roofline_kernels import Bench, Result, groups
from roofline_report import Ceilings, Rated
from roofline_steps import Steps, batches

from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine
from pypto_serving.kernels.roofline import Memory
from pypto_serving.setup.host import read_host_facts
from pypto_serving.types.config import Head

CASE_S, QUICK_CASE_S = 0.5, 0.1
ROUND_BYTES = 256 << 20
"""Read between the rounds of a case to know the bandwidth of the moment."""


class Roofline:
    """One run: measures the limits around everything else, and collects what it sees."""

    def __init__(self, bench: Bench, single: Engine, progress: Progress) -> None:
        self.bench, self._single, self._progress = bench, single, progress
        self.ceilings, self._memory = Ceilings(), Memory()

    def limits(self) -> None:
        """Measure the limits once more."""
        self.ceilings.measure(self._memory, self.bench.engine, self._single)

    def kernels(self, quick: bool, only: str) -> list[Result]:
        """Every kernel by itself, of groups whose name contains `only`."""
        results = []
        todo = [group for group in (*groups(quick), *roofline_quantized.groups(quick)) if only in group.name]
        task = self._progress.add_task("", total=sum(len(group.cases) for group in todo))
        for group in todo:
            self._progress.update(task, description=group.name)
            self.limits()
            run = group.prepare(self.bench)
            for case in group.cases:
                results += run(case)
                self._progress.advance(task)
            del run
        self.limits()
        return results

    def steps(self, steps: Steps) -> tuple[list[Result], dict[str, int]]:
        """Whole steps, and the tokens of each."""
        results: list[Result] = []
        tokens = {}
        for batch in self._progress.track(steps.batches, description="steps"):
            self.limits()
            results += steps.measure(batch, self.bench)
            tokens[results[-1].shape] = batch.tokens
        self.limits()
        return results, tokens


def start_torch(threads: int) -> None:
    """As many threads as ours, and nothing recorded for gradients."""
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def tables(
    kernels: list[Rated], steps: list[Rated], tokens: dict[str, int], ceilings: Ceilings, about: dict[str, Any]
) -> tuple[list[tuple[str, report.Rows]], list[str]]:
    """Titled tables, and lines that say what they were measured on."""
    titled = [("Kernels", report.kernel_table(kernels))]
    if steps:
        titled.append(("Steps", report.step_table(steps)))
        titled.append(("Tokens per second", report.speed_table(steps, tokens)))
    return titled, [", ".join(f"{key} {value}" for key, value in about.items()), *ceilings.lines()]


def save(out: Path, titled: list[tuple[str, report.Rows]], lines: list[str]) -> None:
    """table.md."""
    text = [*(f"- {line}" for line in lines), "", *(report.markdown(*table) for table in titled)]
    (out / "table.md").write_text("\n".join(text))


def main(
    model: Annotated[Path | None, typer.Option(help="Checkpoint whose whole steps are measured too.")] = None,
    head: Annotated[
        Head, typer.Option(help="int8: round the checkpoint's output layer, as `serve --head` does.")
    ] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for table.md, roofline.json and roofline.png.")] = None,
    torch: Annotated[bool, typer.Option("--torch", help="Measure torch's products and attention beside ours.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few cases in less than a minute.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="0: as many as CPUs.")] = 0,
    kernels: Annotated[str, typer.Option(help="Instruction set; by default the best.")] = "",
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this, such as attend.")] = "",
) -> None:
    """Measure the machine, its kernels and whole steps, and print the tables."""
    threads = threads or read_host_facts().num_cpus
    engine, single = Engine(kernels, threads), Engine(kernels, 1)
    if torch:
        start_torch(threads)
    about = {"kernels": engine.instruction_set, "threads": threads, "quick": quick}
    whole: list[Result] = []
    tokens: dict[str, int] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bench = Bench(engine, QUICK_CASE_S if quick else CASE_S, torch, Memory(ROUND_BYTES))
        run = Roofline(bench, single, progress)
        alone = run.kernels(quick, only)
        if model:
            whole, tokens = run.steps(Steps(model, engine.instruction_set, threads, batches(quick), head))
    rated, steps = ([Rated.of(one, run.ceilings) for one in results] for results in (alone, whole))
    titled, lines = tables(rated, steps, tokens, run.ceilings, about)
    console = Console()
    for title, rows in titled:
        report.show(console, title, rows)
    console.print("\n".join(lines), highlight=False)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        save(out, titled, lines)
        report.save_json(out / "roofline.json", about, run.ceilings, kernels=rated, steps=steps)
        if not report.plot(out / "roofline.png", rated, run.ceilings):
            typer.echo("no plot: matplotlib is not installed", err=True)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ConfigError as error:
        sys.exit(f"error: {error}")
