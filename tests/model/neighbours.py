"""A sequence that runs among others, to compare its logits with those without neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.model.sequences import Array, Sequences

BUNDLED = Path(__file__).resolve().parents[2] / "pypto_serving" / "assets" / "bundled"
PROMPT, OUTPUT = 275, 5


def random_tokens(seed: int, length: int) -> Array:
    return np.random.default_rng(seed).integers(0, 256, length)


TOKENS = random_tokens(0, PROMPT + OUTPUT)


@dataclass(frozen=True)
class Subject:
    """A program, and what it says at the end of the prompt and after each output token without neighbours."""

    program: Any
    alone: dict[int, Array]


Subjects = Callable[..., Subject]


def assert_same(found: dict[int, Array], wanted: dict[int, Array]) -> None:
    for position, row in wanted.items():
        assert np.isfinite(row).all()
        assert np.array_equal(found[position], row), f"position {position} differs"


def run_among_others(
    program: Any, others: int, chunks: list[int], seed: int, tokens: Array = TOKENS, longest: int = 1000
) -> dict[int, Array]:
    """`tokens` in chunks, among decoding rows of all lengths and prefills of all sizes that come and go."""
    rng = np.random.default_rng(seed)
    sequences = Sequences(program, seed)
    rows = [sequences.add(random_tokens(i, longest)) for i in range(1, 1 + others)]
    sequences.step([(s, int(rng.integers(1, 40))) for s in rows])
    target = sequences.add(tokens)
    for chunk in chunks:
        work = [(s, int(rng.choice([1, 1, 1, 2, 9, 33]))) for s in rows]
        work.insert(int(rng.integers(len(work))), (target, chunk))
        sequences.step(work)
        sequences.free(rows[int(rng.integers(len(rows)))])
    return target.logits
