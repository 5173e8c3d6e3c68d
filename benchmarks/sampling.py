"""Measure what penalties, biases, bans and masks add to a step, in milliseconds and as a share of it.

    python benchmarks/sampling.py --model DIR --threads 2
    python benchmarks/sampling.py --step-ms 310

A step samples one token for each row, from the worker's RowSamplers on. Every row asks for the same; `all` is all of
the others together, with a mask that a grammar sets for each row and step. Rounds with and without changes alternate,
and what is added is the median of their differences. The step is a decode of MODEL with these rows and this context,
or `--step-ms`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from roofline_kernels import replay
from roofline_steps import Steps
from roofline_work import Batch
from rounds import head, row, seconds

from pypto_serving.kernels import Engine, NativeSampler, runnable
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.sampling import MAX_BAD_WORDS, MAX_BIASES, RowSampling
from pypto_serving.worker.sampler import RowSamplers

FILTERS = {"greedy": {"temperature": 0.0}, "top-p 0.9": {"temperature": 1.0, "top_p": 0.9}}
OUTPUT = 0.5
"""Share of the context that is output."""


def peaked_logits(rows: int, vocab: int) -> np.ndarray:
    """Draw logits with 300 likely tokens, as after training."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 2.5
    logits[:, rng.permutation(vocab)[:300]] += np.linspace(6, 18, 300, dtype=np.float32)
    return logits


def cases(rng: np.random.Generator, vocab: int, context: int) -> dict[str, RowSampling]:
    """Return what a row may ask for, each at its largest."""
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
    """Return what chooses a token for all rows, following all but the last of their `tokens`."""
    (count, vocab), length = logits.shape, tokens.shape[1] - 1
    samplers = RowSamplers(tokens, vocab)
    for i in range(count):
        samplers.set_row(i, replace(row, seed=i), int(length * (1 - OUTPUT)))
    rows, positions = np.arange(count, dtype=np.int32), np.full(count, length, np.int32)
    mask = np.full(-(-vocab // 32), 0x0F0F0F0F, np.uint32)

    def step() -> None:
        for i in range(count) if masked else ():
            samplers.masks.put(i, 0, mask)
        samplers.sample(logits, rows, positions, sampler)

    return step


def rounds_ms(repeats: int, *calls: Callable[[], object]) -> np.ndarray:
    """Return milliseconds [repeats, calls], after a round that does not count."""
    return np.array([[1e3 * seconds(call) for call in calls] for _ in range(repeats + 1)])[1:]


def step_ms(model: Path, threads: int, rows: int, context: int) -> float:
    """Return the milliseconds of a decode step of the model, without sampling."""
    steps = Steps(model, runnable()[0], threads, [Batch.decode(rows, context)])
    inputs = steps.batches[0].inputs(np.random.default_rng(0), steps.config.model.vocab_size)
    return float(np.median(rounds_ms(5, lambda: replay(steps.recording, inputs))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--step-ms", type=float)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    rng, logits = np.random.default_rng(0), peaked_logits(given.rows, given.vocab)
    tokens = rng.integers(0, given.vocab, (given.rows, given.context + 1), np.int32)
    sampler, whole = NativeSampler(Engine("", given.threads)), given.step_ms
    if given.model is not None:
        whole = step_ms(given.model, given.threads, given.rows, given.context)
    print(f"{given.rows} rows of {given.vocab} logits, {given.context} tokens, {given.threads} threads")
    print(f"step {whole:.1f} ms\n" if whole else "give --model or --step-ms to see shares of a step\n")
    print(head("filter", "each row asks for", "ms without", "added ms", "of step"))
    for name, values in FILTERS.items():
        plain = sampling(sampler, logits, tokens, RowSampling(**values))
        for asked, each in cases(rng, given.vocab, given.context).items():
            masked = asked in ("grammar's mask", "all")
            changed = sampling(sampler, logits, tokens, replace(each, **values), masked)
            found = rounds_ms(given.repeats, plain, changed)
            before, added = np.median(found[:, 0]), np.median(found[:, 1] - found[:, 0])
            print(row(name, asked, f"{before:.2f}", f"{added:.2f}", f"{added / whole:.2%}" if whole else ""))


if __name__ == "__main__":
    main()
