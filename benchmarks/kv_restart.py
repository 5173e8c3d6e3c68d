"""Measure how much of the KV cache survives a restart under load: cached prompt tokens before and after.

    python benchmarks/kv_restart.py --model DIR_06B --disk DIR        # an empty folder on the disk to be measured

Clients ask one request after another; each prompt is one of a few shared prefixes and tokens of its own. The prefixes
do not fit on the device together. After some rounds over all of them the server is killed, or told to stop, while all
clients have requests in flight, and started again on the same folder. The last round before is compared with the first
one after it; then the cache is cleared and the same prompts are asked again, which must not change an answer.
"""

from __future__ import annotations

import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
import workloads

TIERS = ("device", "disk")
PATIENCE_S = 240


@dataclass(frozen=True)
class Shape:
    """Requests: `prefixes` of `prefix` tokens that are shared, each followed by `own` tokens; `output` tokens come."""

    prefixes: int
    prefix: int
    own: int
    output: int
    clients: int
    vocabulary: range

    def chosen(self, number: int) -> int:
        """The prefix of prompt `number`. A round is `prefixes` prompts, from a multiple of it on, and has each once."""
        turn, place = divmod(number, self.prefixes)
        return random.Random(f"round {turn}").sample(range(self.prefixes), self.prefixes)[place]

    def prompt(self, number: int) -> list[int]:
        """Token ids of prompt `number`."""
        shared = random.Random(f"prefix {self.chosen(number)}").choices(self.vocabulary, k=self.prefix)
        return shared + random.Random(f"request {number}").choices(self.vocabulary, k=self.own)

    @property
    def tokens(self) -> int:
        """Number of tokens of all prefixes."""
        return self.prefixes * self.prefix


@dataclass(frozen=True)
class Answer:
    """What came back for prompt `number`: its text, prompt tokens by tier that were cached, and how long it took."""

    number: int
    text: str
    cached: dict[str, int]
    seconds: float

    @property
    def hits(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached.values())


class Clients:
    """Threads that send the prompts from number `first` on to a server, each the next one when it has its answer.

    They go on until a request fails, or `join` is called. `answers` are in the order in which they came.
    """

    def __init__(self, url: str, shape: Shape, first: int, end: int | None = None) -> None:
        """Begin to send; no prompts from number `end` on."""
        self.answers: list[Answer] = []
        self._url, self._shape, self._next, self._end = url, shape, first, end
        self._changed = threading.Condition()
        self._stopped = self._failed = False
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(shape.clients)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=120) as http:
            while (number := self._take()) is not None:
                answer = ask(http, self._shape, number)
                with self._changed:
                    if answer is None:
                        self._stopped = self._failed = True
                    else:
                        self.answers.append(answer)
                    self._changed.notify_all()

    def _take(self) -> int | None:
        with self._changed:
            if self._stopped or self._next == self._end:
                return None
            self._next += 1
            return self._next - 1

    def wait(self, enough: Callable[[Sequence[Answer]], bool]) -> list[Answer]:
        """The answers so far when there are enough of them; the clients go on. Raises RuntimeError if that fails."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failed or enough(self.answers), PATIENCE_S):
                raise RuntimeError(f"{len(self.answers)} answers in {PATIENCE_S} s were not enough")
            if self._failed:
                raise RuntimeError("a request failed")
            return list(self.answers)

    def join(self) -> int:
        """Send nothing more and wait for what is in flight; the number of the next prompt."""
        with self._changed:
            self._stopped = True
        for thread in self._threads:
            thread.join()
        return self._next


def one_round(url: str, shape: Shape, first: int) -> list[Answer]:
    """Answers to the round of prompts that begins with number `first`, in order; nothing else is sent."""
    clients = Clients(url, shape, first, first + shape.prefixes)
    answers = clients.wait(lambda answers: len(answers) == shape.prefixes)
    clients.join()
    return sorted(answers, key=lambda answer: answer.number)


def next_round(number: int, shape: Shape) -> int:
    """The first prompt of a round that is not before `number`."""
    return -(-number // shape.prefixes) * shape.prefixes


def ask(http: httpx.Client, shape: Shape, number: int) -> Answer | None:
    """One request; None if it fails."""
    body = {"prompt": shape.prompt(number), "max_tokens": shape.output, "temperature": 0, "ignore_eos": True}
    started_s = time.perf_counter()
    try:
        answer = http.post("/v1/completions", json=body)
    except httpx.HTTPError:
        return None
    if answer.status_code != 200:
        return None
    content: dict[str, Any] = answer.json()
    cached = content["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    return Answer(number, content["choices"][0]["text"], cached, time.perf_counter() - started_s)


def end(pid: int, signum: int) -> None:
    """End a server, with SIGKILL all of its processes at once, and wait until all are gone."""
    api = psutil.Process(pid)
    family = [api, *api.children(recursive=True)]
    for process in family if signum == signal.SIGKILL else [api]:
        with suppress(psutil.NoSuchProcess):  # its end follows from that of its parent
            process.send_signal(signum)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"left behind: {alive}"


@contextmanager
def server(model: Path, options: Sequence[str]) -> Iterator[tuple[int, str]]:
    """A server's process id and address; it may be ended within the block."""
    with workloads.server(model, list(options)) as ready:
        yield ready["pid"], ready["url"]


def restart(
    model: Path, options: Sequence[str], shape: Shape, rounds: int, signum: int
) -> tuple[list[Answer], list[Answer], int]:
    """The last answers before a restart, as many as there are after it, and how many of those were wrong."""
    with server(model, options) as (pid, url):
        clients = Clients(url, shape, 0)
        before = clients.wait(lambda answers: len(answers) >= rounds * shape.prefixes)[-shape.prefixes :]
        end(pid, signum)
        first = next_round(clients.join(), shape)
    with server(model, options) as (_, url):
        after = one_round(url, shape, first)
        httpx.post(f"{url}/reset_prefix_cache", timeout=120).raise_for_status()
        computed = one_round(url, shape, first)
    return before, after, sum(a.text != b.text for a, b in zip(after, computed, strict=True))


def rows(name: str, shape: Shape, before: Sequence[Answer], after: Sequence[Answer], wrong: int) -> Iterator[str]:
    """Lines of a table."""
    for when, answers, differ in (("before", before, ""), ("after", after, str(wrong))):
        prompts = len(answers) * (shape.prefix + shape.own)
        by_tier = {tier: sum(a.cached[tier] for a in answers) for tier in TIERS}
        rates = [f"{count / prompts:.1%}" for count in (sum(by_tier.values()), *by_tier.values())]
        took_ms = statistics.median(a.seconds for a in answers) * 1e3
        yield f"| {name}, {when} | {len(answers)} | {' | '.join(rates)} | {took_ms:.0f} | {differ} |"


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint in the shape of Qwen3-0.6B.")],
    disk: Annotated[Path, typer.Option(help="Folder on the disk to be measured.")],
    prefixes: Annotated[int, typer.Option(min=1)] = 12,
    clients: Annotated[int, typer.Option(min=1)] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Over all prefixes, before the restart.")] = 3,
    kv_memory: Annotated[str, typer.Option(help="Device memory for KV.")] = "192MiB",
) -> None:
    """Measure both ways to end and print the table."""
    shape = Shape(prefixes, prefix=256, own=20, output=8, clients=clients, vocabulary=range(1000))
    typer.echo("| | requests | prompt tokens cached | from the device | from disk | median ms | wrong answers |")
    typer.echo("|---|---|---|---|---|---|---|")
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with tempfile.TemporaryDirectory(dir=disk) as folder:
            options = ["--kv-memory", kv_memory, "--max-model-len", "512", "--kv-disk", folder]
            found = restart(model, options, shape, rounds, signum)
            for line in rows(signum.name, shape, *found):
                typer.echo(line)


if __name__ == "__main__":
    typer.run(main)
