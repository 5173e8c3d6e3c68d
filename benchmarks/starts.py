"""Compare how long servers take to start: each command is started in turns, and timed to its ready line.

    starts.py "pypto-serving serve DIR" "pypto-serving serve DIR --tp 2" [--rounds 7] [--cold DIR]

A first start of each does not count. It stays up for a while, in which `--packed-cache` writes its files. Prints the
median of each, and the ratio to the first command: the median of all rounds, and quartiles. A warm start reads the
checkpoint from the page cache; before a cold one, the page cache forgets the files of the given folders.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import typer
from pairs import served


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def start(command: str, cold: list[Path], settle_s: float = 0) -> float:
    """Start a server, and end it after `settle_s`. Return how long it took to be ready."""
    for folder in cold:
        forget(folder)
    begun_s = time.perf_counter()
    with served(command):
        ready_s = time.perf_counter() - begun_s
        time.sleep(settle_s)
    return ready_s


def main(
    commands: Annotated[list[str], typer.Argument(help="Serve commands without --port.")],
    rounds: Annotated[int, typer.Option(min=2, help="Starts of each that count.")] = 7,
    cold: Annotated[list[Path] | None, typer.Option(help="A folder that the page cache forgets before each.")] = None,
    settle: Annotated[float, typer.Option(min=0, help="Seconds that first starts stay up.")] = 10,
) -> None:
    """Start all in turns."""
    for command in commands:
        start(command, [], settle)
    times: list[list[float]] = [[] for _ in commands]
    for turn in range(rounds):
        order = range(len(commands)) if turn % 2 == 0 else reversed(range(len(commands)))
        for which in order:
            times[which].append(start(commands[which], cold or []))
    print("| command | ready s | of the first | quartiles |\n|---|---|---|---|")
    for command, own in zip(commands, times, strict=True):
        ratios = [a / b for a, b in zip(own, times[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        print(f"| `{command}` | {statistics.median(own):.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
