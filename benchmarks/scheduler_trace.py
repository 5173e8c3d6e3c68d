"""Request traces for schedulers, and their replay. Imports no engine, so that it runs in every environment."""

from __future__ import annotations

import gc
import statistics
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

VOCAB_SIZE = 32_000
PREFIXES, PREFIX_TOKENS = 4, 256


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before step `step`; lengths in tokens. `prefix` < 0: no shared prefix."""

    step: int
    prompt: int
    output: int
    prefix: int = -1

    def token_ids(self, index: int) -> list[int]:
        """Return the prompt: the shared prefix, then ids that depend on `index` alone."""
        shared = _draw((1, self.prefix), PREFIX_TOKENS) if self.prefix >= 0 else []
        return shared + _draw((2, index), self.prompt)


@dataclass(frozen=True)
class Trace:
    """Arrivals in order of `step`, and limits for every engine. `warm` steps come before `steps` timed ones.

    `blocks` have `block_size` tokens each; an engine may reserve one of them.
    """

    name: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    blocks: int
    warm: int
    steps: int
    arrivals: tuple[Arrival, ...]
    block_size: int = 32


@dataclass(frozen=True)
class Replay:
    """Microseconds per timed step of one replay: plan and commit (mean, median), and adding requests.

    `longest_us` is the longest step of all, which matches and publishes the longest prompt.
    `tokens` counts the tokens sampled by all steps; equal work gives equal counts.
    """

    step_us: float
    median_step_us: float
    add_us: float
    longest_us: float
    tokens: int


class Engine(Protocol):
    """A scheduler under test. Both calls return the seconds spent in it alone."""

    def add(self, name: str, token_ids: list[int], output: int) -> float: ...

    def step(self) -> tuple[float, int]:
        """Plan a step and commit its result. Also return the number of sampled tokens."""
        ...


def replay(trace: Trace, engine: Engine) -> Replay:
    """Run the whole trace on `engine`, which must be new."""
    prepared = [(one, f"request-{i}", one.token_ids(i)) for i, one in enumerate(trace.arrivals)]
    arrivals, added, steps, longest, tokens = iter(prepared), 0.0, [], 0.0, 0
    ahead = next(arrivals, None)
    gc.collect()
    for number in range(trace.warm + trace.steps):
        timed = number >= trace.warm
        while ahead is not None and ahead[0].step <= number:
            arrival, name, token_ids = ahead
            added += engine.add(name, token_ids, arrival.output) * timed
            ahead = next(arrivals, None)
        seconds, sampled = engine.step()
        tokens += sampled
        longest = max(longest, seconds * 1e6)
        if timed:
            steps.append(seconds * 1e6)
    return Replay(statistics.fmean(steps), statistics.median(steps), added * 1e6 / trace.steps, longest, tokens)


def steady(running: int) -> Trace:
    """Make a trace with `running` requests at all times: slightly more arrive than end, so no row is ever free.

    A prompt has 16 to 256 tokens of its own; half of the prompts begin with one of PREFIXES shared prefixes.
    """
    rng = np.random.default_rng(running)
    warm, steps, mean = 100, 400, 128

    def arrival(step: int, low: int) -> Arrival:
        prompt, output, prefix = rng.integers((16, low, -PREFIXES), (257, 3 * mean // 2 + 1, PREFIXES))
        return Arrival(step, int(prompt), int(output), int(max(-1, prefix)))

    late = int(1.1 * running * (warm + steps) / mean)
    first = [arrival(0, 1) for _ in range(running)]
    rest = [arrival(int((i + 1) * (warm + steps) / late), mean // 2) for i in range(late)]
    blocks = running * 32 + 1
    return Trace(f"{running} running", running, 2048, 4096, blocks, warm, steps, tuple(first + rest))


def at_context(tokens: int) -> Trace:
    """Make a trace of 8 decoding requests with `tokens` prompt tokens each. A tenth of the blocks stays free."""
    output = 400
    arrivals = tuple(Arrival(0, tokens, output) for _ in range(8))
    length = tokens + output + 1
    blocks = 9 * (length // 32 + 2)
    budget = max(2048, length)
    return Trace(f"context {tokens}", 8, budget, length, blocks, 20, 320, arrivals)


def with_waiting(waiting: int) -> Trace:
    """Make a trace of 64 decoding requests while `waiting` others wait for rows."""
    running = tuple(Arrival(0, 64, 500) for _ in range(64))
    others = tuple(Arrival(5, 64, 500) for _ in range(waiting))
    return Trace(f"{waiting} waiting", 64, 4096, 1024, 64 * 32, 20, 320, running + others)


def _draw(seed: Any, count: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(VOCAB_SIZE, size=count).tolist()
    return drawn
