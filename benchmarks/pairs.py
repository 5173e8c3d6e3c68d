"""Compare two commands that serve the same model: both are up, and answer the same load in turns.

    pairs.py "pypto-serving serve DIR" "pypto-serving serve DIR --tp 2" --load 1x128+96 --load 16x256+64

Prints the speed of the second over that of the first, which a machine that changes its speed from minute to minute
leaves alone: the median of all pairs, and quartiles. Prompts are fresh random token ids; answers are greedy.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import statistics
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Annotated, NamedTuple

import httpx
import typer

FIRST_ID, LAST_ID = 1000, 4000
"""Token ids that any tested vocabulary holds and that are no special tokens."""


class Load(NamedTuple):
    """`requests` at once, each of `prompt` tokens with `output` tokens as the answer."""

    requests: int
    prompt: int
    output: int

    @staticmethod
    def parse(text: str) -> Load:
        """Read `REQUESTSxPROMPT+OUTPUT`. Raises typer.BadParameter."""
        if not (found := re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)):
            raise typer.BadParameter(f"{text} is not of the form REQUESTSxPROMPT+OUTPUT, such as 16x256+64")
        return Load(*map(int, found.groups()))


@contextmanager
def served(command: str) -> Iterator[httpx.Client]:
    """Run a `serve` command on a free port and yield a client of it."""
    words = [*shlex.split(command), "--port", "0", "--log-level", "error"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            if not ready:
                raise typer.BadParameter(f"{command} ended before it was ready; run it by itself")
            with httpx.Client(base_url=json.loads(ready)["url"], timeout=600) as client:
                yield client
        finally:
            process.terminate()


def seconds(client: httpx.Client, load: Load, rng: random.Random) -> float:
    """Return how long a server takes for a load."""
    prompts = [rng.choices(range(FIRST_ID, LAST_ID), k=load.prompt) for _ in range(load.requests)]

    def ask(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": load.output, "ignore_eos": True, "temperature": 0}
        client.post("/v1/completions", json=body).raise_for_status()

    start = time.perf_counter()
    with ThreadPoolExecutor(load.requests) as pool:
        list(pool.map(ask, prompts))
    return time.perf_counter() - start


def main(
    first: Annotated[str, typer.Argument(help="A serve command without --port.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    load: Annotated[list[str], typer.Option(help="REQUESTSxPROMPT+OUTPUT; may be given several times.")],
    rounds: Annotated[int, typer.Option(min=2, help="Pairs of each load.")] = 7,
) -> None:
    """Ask both in turns."""
    loads, rng = [Load.parse(text) for text in load], random.Random(0)
    print("| load | first s | second s | speed of the second | quartiles |\n|---|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        clients = [stack.enter_context(served(command)) for command in (first, second)]
        for text, each in zip(load, loads, strict=True):
            for client in clients:
                seconds(client, each, rng)
            times: tuple[list[float], list[float]] = ([], [])
            for i in range(rounds):
                for which in (0, 1) if i % 2 == 0 else (1, 0):
                    times[which].append(seconds(clients[which], each, rng))
            ratios = [a / b for a, b in zip(*times, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            first_s, second_s = map(statistics.median, times)
            print(f"| {text} | {first_s:.2f} | {second_s:.2f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
