"""Measure what penalties, biases, bans and masks add to a step, in milliseconds and as a share of it.

    python benchmarks/adjustments.py --model DIR --threads 2
    python benchmarks/adjustments.py --step-ms 310

A step samples one token for each row, from the worker's RowSamplers on. Every row asks for the same; `all` is all of
the others together, with a mask that a grammar sets for each row and step. Rounds with and without changes alternate,
and what is added is the median of their differences. The step is a decode of MODEL with these rows and this context,
or `--step-ms`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from roofline_kernels import replay
from roofline_steps import Steps
from roofline_work import Batch
from sampling import logits_of

from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine, NativeSampler, runnable
from pypto_serving.types.sampling import MAX_BAD_WORDS, MAX_BIASES, RowSampling
from pypto_serving.types.tokens import pack_ids
from pypto_serving.worker.sampler import RowSamplers

FILTERS = {"greedy": {"temperature": 0.0}, "top-p 0.9": {"temperature": 1.0, "top_p": 0.9}}
OUTPUT = 0.5
"""Share of the context that is output."""


def cases(rng: np.random.Generator, vocab: int, context: int) -> dict[str, RowSampling]:
    """What a row may ask for, each at its largest."""
    ids = rng.permutation(vocab)[:MAX_BIASES].astype(np.int32)
    words = rng.integers(0, vocab, (MAX_BAD_WORDS, 8), np.int32)
    found = {
        "frequency, presence": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
        "repetition": {"repetition_penalty": 1.1},
        f"{len(ids)} biases": {"bias_ids": pack_ids(ids), "bias_values": rng.random(len(ids), np.float32).tobytes()},
        f"{len(ids)} allowed ids": {"allowed_ids": pack_ids(ids)},
        f"{len(words)} bad words": {"bad_words": tuple(map(pack_ids, words))},
        "min_tokens": {"min_tokens": context, "banned_ids": pack_ids(ids[:16])},
    }
    every = {name: value for fields in found.values() for name, value in fields.items()}
    return {name: RowSampling(**fields) for name, fields in found.items()} | {
        "grammar's mask": RowSampling(),
        "all": RowSampling(**every),
    }


def sampling(
    sampler: NativeSampler, logits: np.ndarray, tokens: np.ndarray, row: RowSampling, masked: bool = False
) -> Callable[[], None]:
    """Return what chooses a token for all rows, behind all but the last of their `tokens`."""
    (count, vocab), length = logits.shape, tokens.shape[1] - 1
    samplers = RowSamplers(tokens, vocab)
    for i in range(count):
        samplers.set(i, replace(row, seed=i), int(length * (1 - OUTPUT)))
    rows, positions = np.arange(count, dtype=np.int32), np.full(count, length, np.int32)
    mask = np.full(-(-vocab // 32), 0x0F0F0F0F, np.uint32)

    def step() -> None:
        for i in range(count) if masked else ():
            samplers.masks.put(i, 0, mask)
        samplers.sample(logits, rows, positions, sampler)

    return step


def rounds_ms(repeats: int, *calls: Callable[[], object]) -> np.ndarray:
    """Return milliseconds [repeats, calls], after a round that does not count."""
    found = np.zeros((repeats + 1, len(calls)))
    for times in found:
        for i, call in enumerate(calls):
            began = time.perf_counter()
            call()
            times[i] = (time.perf_counter() - began) * 1e3
    return found[1:]


def step_ms(model: Path, instruction_set: str, threads: int, rows: int, context: int) -> float:
    """Return the milliseconds of a decode step of the model, without sampling."""
    steps = Steps(model, instruction_set or runnable()[0], threads, [Batch.decode(rows, context)])
    inputs = steps.batches[0].inputs(np.random.default_rng(0), steps.config.vocab_size)
    return float(np.median(rounds_ms(5, lambda: replay(steps._program.model.step, inputs))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--instruction-set", default="")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    logits = logits_of("peaked", given.rows, given.vocab)
    tokens = rng.integers(0, given.vocab, (given.rows, given.context + 1), np.int32)
    sampler = NativeSampler(Engine(given.instruction_set, given.threads))
    whole = given.step_ms
    if given.model is not None:
        whole = step_ms(given.model, given.instruction_set, given.threads, given.rows, given.context)
    print(f"{given.rows} rows of {given.vocab} logits, {given.context} tokens, {given.threads} threads")
    print(f"step {whole:.1f} ms" if whole else "give --model or --step-ms to see shares of a step")
    print(f"{'filter':12}{'row asks for':24}{'ms without':>12}{'added ms':>10}{'of step':>9}")
    for name, values in FILTERS.items():
        plain = sampling(sampler, logits, tokens, RowSampling(**values))
        for asked, row in cases(rng, given.vocab, given.context).items():
            masked = asked in ("grammar's mask", "all")
            changed = sampling(sampler, logits, tokens, replace(row, **values), masked)
            found = rounds_ms(given.repeats, plain, changed)
            before, added = np.median(found[:, 0]), np.median(found[:, 1] - found[:, 0])
            share = f"{added / whole:9.2%}" if whole else ""
            print(f"{name:12}{asked:24}{before:12.2f}{added:10.2f}{share}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
