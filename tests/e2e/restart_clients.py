"""Clients of a restart under load: each sends one request after another, with a shared prefix and tokens of its own."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

PATIENCE_S = 240


@dataclass(frozen=True)
class Shape:
    """Requests: `prefixes` shared prefixes of `prefix` tokens, then `own` tokens each. Answers have `output` tokens."""

    prefixes: int
    prefix: int
    own: int
    output: int
    clients: int
    vocabulary: range

    def chosen(self, number: int) -> int:
        """Return the prefix of prompt `number`. A round, `prefixes` prompts from a multiple of that, has each once."""
        turn, place = divmod(number, self.prefixes)
        return random.Random(f"round {turn}").sample(range(self.prefixes), self.prefixes)[place]

    def prompt(self, number: int) -> list[int]:
        """Return the token ids of prompt `number`."""
        shared = random.Random(f"prefix {self.chosen(number)}").choices(self.vocabulary, k=self.prefix)
        return shared + random.Random(f"request {number}").choices(self.vocabulary, k=self.own)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all prefixes."""
        return self.prefixes * self.prefix


@dataclass(frozen=True)
class Answer:
    """The answer to prompt `number`: its text, its cached prompt tokens by tier, and its duration."""

    number: int
    text: str
    cached: dict[str, int]
    seconds: float

    @property
    def hits(self) -> int:
        """Return the cached prompt tokens."""
        return sum(self.cached.values())


class Clients:
    """Threads that send the prompts from number `first` on to a server; each sends the next one after its answer.

    They stop when a request fails or `join` is called. `answers` are in order of arrival.
    """

    def __init__(self, url: str, shape: Shape, first: int, end: int | None = None) -> None:
        """Start sending; stop before prompt number `end`."""
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
        """Return the answers so far once there are enough; the clients continue. Raises RuntimeError if that fails."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._failed or enough(self.answers), PATIENCE_S):
                raise RuntimeError(f"{len(self.answers)} answers in {PATIENCE_S} s were not enough")
            if self._failed:
                raise RuntimeError("a request failed")
            return list(self.answers)

    def join(self) -> int:
        """Stop sending and wait for the requests in flight. Return the number of the next prompt."""
        with self._changed:
            self._stopped = True
        for thread in self._threads:
            thread.join()
        return self._next


def one_round(url: str, shape: Shape, first: int) -> list[Answer]:
    """Send the round of prompts that begins with number `first`, and return the answers in order."""
    clients = Clients(url, shape, first, first + shape.prefixes)
    answers = clients.wait(lambda answers: len(answers) == shape.prefixes)
    clients.join()
    return sorted(answers, key=lambda answer: answer.number)


def next_round(number: int, shape: Shape) -> int:
    """Return the first prompt of the next round, which begins at `number` or later."""
    return -(-number // shape.prefixes) * shape.prefixes


def ask(http: httpx.Client, shape: Shape, number: int) -> Answer | None:
    """Send one request. Return None if it fails."""
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
    """Signal a server, for SIGKILL all of its processes, and wait until all have ended."""
    api = psutil.Process(pid)
    family = [api, *api.children(recursive=True)]
    for process in family if signum == signal.SIGKILL else [api]:
        with suppress(psutil.NoSuchProcess):  # it ended with its parent
            process.send_signal(signum)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, f"left behind: {alive}"
