"""Measure milliseconds per sampled row: the kernels on one thread, and sorting in numpy.

`of limit` is the time of a plain maximum, which reads the logits once, over the kernels' time.
"""

from __future__ import annotations

import argparse
import sys
import timeit
from collections.abc import Callable

import numpy as np

from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.errors import ConfigError
from pypto_serving.kernels import Engine, NativeSampler
from pypto_serving.types.sampler import DRAW, Sampler

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature": {},
    "min-p 0.05": {"min_p": 0.05},
    "top-k 20": {"top_k": 20},
    "top-k 50000": {"top_k": 50_000},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.999": {"top_p": 0.999},
    "20 logprobs": {"temperature": 0, "logprobs": 20},
}


def logits_of(kind: str, rows: int, vocab: int) -> np.ndarray:
    """Draw logits: normal, peaked with 300 likely tokens as after training, or almost flat."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * {"normal": 3, "peaked": 2.5, "flat": 1e-3}[kind]
    if kind == "peaked":
        logits[:, rng.permutation(vocab)[:300]] += np.linspace(6, 18, 300, dtype=np.float32)
    return logits


def job(sampler: Sampler, logits: np.ndarray, values: dict[str, float]) -> Callable[[], object]:
    rows = len(logits)
    draws = np.zeros(rows, DRAW)
    draws["temperature"], draws["top_p"], draws["random"] = 1, 1, np.random.default_rng(1).random(rows)
    for name in values.keys() & set(DRAW.names or ()):
        draws[name] = values[name]
    if "logprobs" not in values:
        return lambda: sampler.choose(logits, draws)
    every = np.arange(rows, dtype=np.int32)
    return lambda: sampler.logprobs(logits, every, sampler.choose(logits, draws), int(values["logprobs"]))


def milliseconds(call: Callable[[], object], rows: int, repeats: int) -> float:
    return min(timeit.repeat(call, number=1, repeat=repeats)) / rows * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--instruction-set", default="")
    arguments = parser.parse_args()
    native, rows = NativeSampler(Engine(arguments.instruction_set)), arguments.rows
    print(f"{'logits':8}{'case':14}{'kernels':>9}{'numpy':>9}{'of limit':>10}")
    for kind in ("normal", "peaked", "flat"):
        logits = logits_of(kind, rows, arguments.vocab)
        limit = milliseconds(lambda logits=logits: logits.max(axis=1), rows, 20)
        for name, values in CASES.items():
            ours = milliseconds(job(native, logits, values), rows, 20)
            theirs = milliseconds(job(PlainSampler(), logits, values), rows, 2)
            print(f"{kind:8}{name:14}{ours:9.3f}{theirs:9.3f}{limit / ours:10.1%}")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"error: {error}")
