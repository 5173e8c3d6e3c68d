"""Drafts of the host: what is looked up, how likely it is said to be, and how many are taken."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pypto_serving.backend.base import StepInputs
from pypto_serving.kernels import NgramDrafter
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.config import LONGEST_MATCH, SHORTEST_MATCH
from pypto_serving.types.sampling import SamplingParams
from pypto_serving.types.step import BackendTraits
from pypto_serving.worker.drafts import RowDrafts, StepCost, paying_drafts
from tests.needs import needs_kernels
from tests.simulation import Simulation, null_config

WIDTH = 600


def int32(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def propose(drafter: NgramDrafter, text: Sequence[int], most: int, row: int = 0) -> tuple[list[int], float]:
    """Drafts behind `text`, and their odds."""
    tokens = np.zeros((row + 1, WIDTH), np.int32)
    tokens[row, : len(text)] = text
    counts, odds = drafter.propose(tokens, int32(row), int32(len(text)), int32(most))
    return tokens[row, len(text) : len(text) + counts[0]].tolist(), float(odds[0])


def followed(text: Sequence[int], end: int, most: int) -> list[int]:
    """What followed the first `end` tokens; where that ends, it goes on with itself."""
    found = list(text)
    for i in range(most):
        found.append(found[end + i])
    return found[len(text) :]


def matches(text: Sequence[int], shortest: int, longest: int) -> dict[int, int]:
    """The length of the match of the last tokens that ends before each token."""
    found = {}
    for end in range(shortest, len(text)):
        length = 0
        while length < min(end, longest) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= shortest:
            found[end] = length
    return found


@needs_kernels
@pytest.mark.parametrize("alphabet", [2, 12, 300])
def test_the_longest_match_is_proposed(alphabet: int) -> None:
    """Of the last 16 places that match at all; the one at hand is kept among equals."""
    rng = random.Random(alphabet)
    num_found = 0
    for _ in range(30):
        shortest, longest = rng.randint(1, 3), rng.choice((3, 8, 64))
        drafter = NgramDrafter(1, shortest, longest)
        text = [rng.randrange(alphabet) for _ in range(rng.randint(1, 200))]
        for _ in range(rng.randint(1, 60)):
            most = rng.randint(0, 6)
            found, _ = propose(drafter, text, most)
            places = matches(text, shortest, longest)
            if not places:
                assert not found
            elif len(places) <= 16:
                best = max(places.values())
                assert found in [followed(text, end, most) for end, length in places.items() if length == best]
                num_found += 1
            copied = rng.randrange(len(text)) if rng.random() < 0.3 else None
            added = [rng.randrange(alphabet)] if copied is None else text[copied : copied + rng.randint(1, 9)]
            text += found[: rng.randint(0, most)] + added
    assert num_found > 50 or alphabet == 2


@needs_kernels
def test_a_row_starts_anew() -> None:
    drafter = NgramDrafter(3, SHORTEST_MATCH, LONGEST_MATCH)
    assert propose(drafter, [1, 2, 3, 4, 1, 2], 3, row=2)[0] == [3, 4, 1]
    drafter.start_row(2)
    assert propose(drafter, [5, 6, 1, 2], 3, row=2)[0] == []
    assert propose(drafter, [5, 6, 1, 2, 5, 6], 9, row=2)[0] == [1, 2, 5, 6, 1, 2, 5, 6, 1]


@needs_kernels
def test_drafts_end_where_the_row_does() -> None:
    drafter, text = NgramDrafter(1, SHORTEST_MATCH, LONGEST_MATCH), [1, 2] * (WIDTH // 2 - 1)
    assert propose(drafter, text, 5)[0] == [1, 2]


@needs_kernels
def test_odds_follow_the_text_without_any_draft_verified() -> None:
    rng = random.Random(1)
    file = [rng.randrange(1000) for _ in range(200)]
    drafter, text, seen = NgramDrafter(1, SHORTEST_MATCH, LONGEST_MATCH), [*file], []
    for token in file[:60] + [rng.randrange(1000, 2000) for _ in range(30)] + file[100:160]:
        text.append(token)
        _, odds = propose(drafter, text, 0)
        seen.append(odds)
    assert seen[10] > 0.8 and seen[55] > 0.95
    assert max(seen[65:90]) == 0.0, "nothing to propose"
    assert seen[-1] > 0.9


@needs_kernels
def test_odds_of_a_text_that_only_seems_to_repeat() -> None:
    rng = random.Random(2)
    drafter, text, odds = NgramDrafter(1, SHORTEST_MATCH, LONGEST_MATCH), [rng.randrange(4) for _ in range(100)], 0.0
    for _ in range(200):
        text.append(rng.randrange(4))
        odds = propose(drafter, text, 0)[1] or odds
    assert 0.1 < odds < 0.45


def measured(base_ms: float, token_ms: float, sizes: Sequence[int], noise: float = 0.0) -> StepCost:
    cost, rng = StepCost(), random.Random(0)
    for i in range(300):
        size = sizes[i % len(sizes)]
        cost.measure(size, (base_ms + token_ms * size) / 1e3 * rng.gauss(1.0, noise))
    return cost


def test_cost_is_what_was_measured() -> None:
    base_s, token_s = measured(20, 3, (1, 5, 3, 1)).seconds()
    assert base_s == pytest.approx(0.020, rel=0.15) and token_s == pytest.approx(0.003, rel=0.15)
    assert measured(20, 3, (1, 5, 3, 1), noise=0.1).seconds()[1] == pytest.approx(0.003, rel=0.5)


def test_cost_before_any_step_and_of_steps_of_one_size() -> None:
    for cost in (StepCost(), measured(20, 3, (4,))):
        base_s, token_s = cost.seconds()
        assert base_s > 0 < token_s < base_s


def test_a_step_that_hangs_changes_little() -> None:
    cost = measured(20, 3, (1, 5))
    before_s = cost.seconds()[0]
    cost.measure(1, 60.0)
    assert cost.seconds()[0] < 2 * before_s


def rate(counts: Sequence[int], odds: Sequence[float], base_s: float, token_s: float) -> float:
    """Expected tokens per second of a step with so many drafts for each row."""
    expected = sum(sum(chance**i for i in range(1 + count)) for count, chance in zip(counts, odds, strict=True))
    return expected / (base_s + token_s * (len(counts) + sum(counts)))


def test_no_other_numbers_of_drafts_are_faster() -> None:
    rng, cost = random.Random(3), measured(20, 3, (1, 9, 4))
    base_s, token_s = cost.seconds()
    for _ in range(40):
        rows, most = rng.randint(1, 3), 4
        counts, odds = [rng.randint(0, most) for _ in range(rows)], [rng.random() for _ in range(rows)]
        found = paying_drafts(int32(*counts), np.array(odds, np.float32), rows, cost).tolist()
        assert all(0 <= each <= count for each, count in zip(found, counts, strict=True))
        every = np.ndindex(*(1 + count for count in counts))
        best = max(rate(each, odds, base_s, token_s) for each in every)
        assert rate(found, odds, base_s, token_s) == pytest.approx(best, rel=0.02)


def test_many_rows_have_no_drafts_but_sure_ones() -> None:
    cost = measured(20, 3, (1, 9, 32))
    for odds, alone, among in ((0.9, range(6, 12), 2), (0.5, range(1, 4), 0), (0.05, range(1), 0)):
        few = paying_drafts(int32(16), np.array([odds], np.float32), 1, cost)
        many = paying_drafts(np.full(32, 16, np.int32), np.full(32, odds, np.float32), 32, cost)
        assert few[0] in alone and many.max() <= among


def no_draws(rows: Int32Array, positions: Int32Array) -> NDArray[np.void]:
    raise AssertionError("nothing is sampled")


def no_layout(rows: Int32Array, positions: Int32Array) -> StepInputs:
    raise AssertionError("nobody asks a model")


class Fixed:
    """Proposes tokens 7 as many as wanted, with these odds. Notes how many are `asked` for."""

    def __init__(self, odds: float) -> None:
        self.odds = odds
        self.asked: list[int] = []

    def start_row(self, row: int) -> None:
        raise AssertionError("no row starts here")

    def propose(
        self, tokens: Int32Array, rows: Int32Array, known: Int32Array, most: Int32Array
    ) -> tuple[Int32Array, Float32Array]:
        for row, start, count in zip(rows, known, most, strict=True):
            tokens[row, start : start + count] = 7
        self.asked = most.tolist()
        return most.copy(), np.full(len(rows), self.odds, np.float32)


@pytest.mark.parametrize(
    ("odds", "expected", "wanted"),
    [(0.0, {}, None), (1.0, {}, [3, 2]), (0.0, {1: (5, 6, 5)}, [0, 2]), (0.0, {0: (5,)}, [1, 0])],
)
def test_tokens_that_must_follow_are_drafts(
    odds: float, expected: Mapping[int, Sequence[int]], wanted: list[int] | None
) -> None:
    """The drafter is not asked for them."""
    tokens, drafter, most = np.zeros((4, 20), np.int32), Fixed(odds), int32(3, 2)
    drafts = RowDrafts(lambda *_: drafter, tokens, no_layout, no_draws)
    counts = drafts.write(int32(3, 1), int32(4, 6), most, 2, expected)
    assert drafter.asked == [0 if i in expected else count for i, count in enumerate((3, 2))]
    assert most.tolist() == [3, 2]
    assert (counts if counts is None else counts.tolist()) == wanted
    for i, each in expected.items():
        row, start, count = (3, 1)[i], (4, 6)[i], (wanted or [0, 0])[i]
        assert tokens[row, start : start + count].tolist() == list(each[:count])


def test_a_draft_layer_that_says_what_the_model_says_is_always_right() -> None:
    """Also where rows sample: a draft is drawn with the numbers of its position."""
    options = {"draft_accuracy": 1.0, "seconds_per_step": 0.01}
    config = null_config(traits=BackendTraits(max_drafts=3), num_drafts=3, backend_options=options)
    simulation = Simulation(config)
    for seed in range(4):
        params = SamplingParams(max_tokens=40, temperature=1.0 + seed, top_k=50 * (seed % 2), logprobs=1)
        simulation.add([seed, 7], params=params, seed=seed)
    simulation.run()
    counters = simulation.counters
    assert counters.num_drafts > 60 and counters.num_accepted >= counters.num_drafts - 4 * 3, "all but behind the end"
