"""Drafts that miss cost nothing, in the virtual time of the null backend, where a step takes a + b * tokens."""

from __future__ import annotations

import random

import pytest

from pypto_serving.types.config import NgramConfig
from pypto_serving.types.step import BackendTraits
from tests.needs import needs_kernels
from tests.simulation import Simulation, null_config

pytestmark = needs_kernels

LENGTH = 150


def served(rows: int, vocab_size: int, token_s: float, num_drafts: int) -> Simulation:
    """Greedy answers of the null backend are random tokens, of so many that all seem to come again, or none does."""
    simulation = Simulation(
        null_config(
            num_blocks=rows * 20,
            vocab_size=vocab_size,
            max_num_seqs=rows,
            max_num_batched_tokens=512,
            traits=BackendTraits(max_drafts=num_drafts),
            num_drafts=num_drafts,
            ngram=NgramConfig(),
            depth=2,
            backend_options={"seconds_per_step": 0.02, "seconds_per_token": token_s},
        )
    )
    rng = random.Random(1)
    for _ in range(rows):
        simulation.add([rng.randrange(vocab_size) for _ in range(60)], max_tokens=LENGTH)
    simulation.run()
    return simulation


def mean_s(simulation: Simulation) -> float:
    """How long an answer takes behind its first token."""
    times = [output.timeline for output in simulation.last.values() if output.timeline is not None]
    assert len(times) == len(simulation.last)
    return sum(time.finished_s - time.first_token_s for time in times) / len(times)


ROWS, TOKEN_S, VOCABULARIES = (1, 4, 24), (0.0002, 0.001, 0.003), (3, 10, 50, 1000)
PAIRS = [(ROWS[(i + j) % 3], token_s, size) for i, token_s in enumerate(TOKEN_S) for j, size in enumerate(VOCABULARIES)]


@pytest.mark.parametrize(
    ("rows", "token_s", "vocab_size"),
    [*PAIRS[::2], *(pytest.param(*pair, marks=pytest.mark.soak) for pair in PAIRS[1::2])],
)
def test_drafts_that_miss_cost_nothing(rows: int, token_s: float, vocab_size: int) -> None:
    plain, guessing = (served(rows, vocab_size, token_s, num_drafts) for num_drafts in (0, 8))
    assert guessing.tokens == plain.tokens
    assert mean_s(guessing) <= mean_s(plain) / 0.98
