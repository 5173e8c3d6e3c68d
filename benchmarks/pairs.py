"""Compare `serve` commands of one model in turns: the speed of two that are both up, or the starts of several.

    pairs.py speed "pypto-serving serve DIR" "pypto-serving serve DIR --tp 2" --load 1x128+96 --load 16x256+64
    pairs.py starts "pypto-serving serve DIR" "pypto-serving serve DIR --tp 2" [--cold DIR]

Ratios to the first command are those of the rounds, which a machine that changes its speed from minute to minute leaves
alone: their median and quartiles. Prompts are fresh random token ids; answers are greedy. A first start of each command
does not count; it stays up for a while, in which `--packed-cache` writes its files. Before a cold start, the page cache
forgets the files of the given folders.
"""

from __future__ import annotations

import random
import re
import shlex
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rounds import head, in_turns, quartiles, ratios, row
from servers import Request, ask_all, elapsed_s, served
from workloads import forget_pages

IDS = range(1000, 4000)
"""Token ids that any tested vocabulary holds and that are no special tokens."""

app = typer.Typer(help="Compare serve commands.")
Rounds = Annotated[int, typer.Option(min=2, help="Rounds that count.")]


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


def answer(url: str, load: Load, rng: random.Random) -> float:
    """Send a load and return the seconds until all answers are complete."""
    requests = [Request(rng.choices(IDS, k=load.prompt), load.output) for _ in range(load.requests)]
    return elapsed_s(ask_all(url, requests, stream=False))


@app.command()
def speed(
    first: Annotated[str, typer.Argument(help="A serve command without --port.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    load: Annotated[list[str], typer.Option(help="REQUESTSxPROMPT+OUTPUT; may be given several times.")],
    rounds: Rounds = 7,
) -> None:
    """Ask both in turns."""
    loads, rng = [Load.parse(text) for text in load], random.Random(0)
    print(head("load", "first s", "second s", "speed of the second (quartiles)"), flush=True)
    with ExitStack() as stack:
        urls = [stack.enter_context(served(shlex.split(command)))["url"] for command in (first, second)]
        for text, each in zip(load, loads, strict=True):
            for url in urls:
                answer(url, each, rng)
            times: tuple[list[float], list[float]] = ([], [])
            for _, which in in_turns((0, 1), rounds):
                times[which].append(answer(urls[which], each, rng))
            middle = (f"{statistics.median(own):.2f}" for own in times)
            print(row(text, *middle, quartiles(ratios(*times))), flush=True)


def start_s(command: str, cold: list[Path], settle_s: float = 0) -> float:
    """Start a server, and end it after `settle_s`. Return how long it took to be ready."""
    forget_pages(cold)
    began_s = time.perf_counter()
    with served(shlex.split(command)):
        ready_s = time.perf_counter() - began_s
        time.sleep(settle_s)
    return ready_s


@app.command()
def starts(
    commands: Annotated[list[str], typer.Argument(help="Serve commands without --port.")],
    rounds: Rounds = 7,
    cold: Annotated[list[Path] | None, typer.Option(help="A folder that the page cache forgets before each.")] = None,
    settle: Annotated[float, typer.Option(min=0, help="Seconds that first starts stay up.")] = 10,
) -> None:
    """Start all in turns."""
    for command in commands:
        start_s(command, [], settle)
    times: dict[str, list[float]] = {command: [] for command in commands}
    for _, command in in_turns(commands, rounds):
        times[command].append(start_s(command, cold or []))
    print(head("command", "ready s", "of the first (quartiles)"))
    for command, own in times.items():
        print(row(f"`{command}`", f"{statistics.median(own):.2f}", quartiles(ratios(own, times[commands[0]]))))


if __name__ == "__main__":
    app()
