"""The sampling kernels: against sorting in numpy and against the definition, for all instruction sets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.kernels import runnable
from tests.kernels.drawing import EDGES, draws, follows, interval, logits_of, native
from tests.needs import needs_kernels
from tests.thinning import examples

pytestmark = pytest.mark.thinned(2)

VOCABS = (1, 15, 16, 17, 1000, 5000, 151_936)
SETTINGS: tuple[dict[str, float], ...] = (
    {"temperature": 0},
    {},
    {"temperature": 0.7, "min_p": 0.05},
    {"min_p": 1},
    {"top_k": 1},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"top_k": 50_000},
    {"top_k": 3, "min_p": 0.01},
    {"top_k": 2**31 - 1, "top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2},
    {"top_p": 0.999_999, "min_p": 1e-4},
    {"temperature": 1e-30, "top_p": 0.5},
    {"temperature": 1e-6},
    {"temperature": 100, "top_p": 0.99},
)
every_set = pytest.mark.parametrize("instruction_set", runnable())


@pytest.mark.thinned(1)
@needs_kernels
@pytest.mark.parametrize("kind", ["normal", "steep", "narrow", "ties", "equal", "masked"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_choices_are_those_of_sorting(vocab: int, kind: str) -> None:
    """But for random numbers on the boundary between two tokens, such as the first ones, which rounding decides."""
    rng = np.random.default_rng(vocab)
    count = len(EDGES) + (2 if vocab > 10_000 else 20)
    logits = logits_of(kind, rng, (count, vocab))
    differ = 0
    for values in SETTINGS:
        rows = draws(rng, count, **values)
        expected = PlainSampler().choose(logits, rows)
        for instruction_set in runnable():
            chosen = native(instruction_set).choose(logits, rows)
            for i in np.flatnonzero(chosen != expected):
                assert follows(logits[i], rows[i], int(chosen[i])), (instruction_set, values, expected[i])
                differ += i >= len(EDGES)
    assert differ <= 0.001 * len(SETTINGS) * len(runnable()) * (count - len(EDGES))


@every_set
@examples(60)
@given(
    vocab=st.integers(1, 3000),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-6, 0.1, 3.0, 100.0]),
    temperature=st.sampled_from([1e-20, 0.3, 1.0, 100.0]),
    top_k=st.integers(0, 3100),
    top_p=st.floats(1e-12, 1),
    min_p=st.sampled_from([0.0, 1e-300, 0.1, 1.0]),
    random=st.floats(0, 1, exclude_max=True),
)
def test_a_choice_follows_the_definition(
    instruction_set: str,
    vocab: int,
    seed: int,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    random: float,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((1, vocab)) * scale).round(int(rng.integers(0, 8))).astype(np.float32)
    (row,) = rows = draws(rng, 1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, random=random)
    assert follows(logits[0], row, int(native(instruction_set).choose(logits, rows)[0]))


@every_set
@pytest.mark.parametrize("values", [{}, {"top_k": 12, "temperature": 1.5}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_frequencies_follow_the_definition(instruction_set: str, values: dict[str, float]) -> None:
    rng, count = np.random.default_rng(5), 20_000
    logits = rng.standard_normal(50).astype(np.float32) * 2
    rows = draws(rng, count, **values)
    found = np.bincount(native(instruction_set).choose(np.broadcast_to(logits, (count, 50)), rows), minlength=50)
    possible = np.flatnonzero(found)
    low, high = np.array([interval(logits, rows[0], int(token), rows[0]["top_p"]) for token in possible]).T
    assert (high - low).sum() > 0.9999, "every token that can come came"
    expected = (high - low) * count
    likely = expected > 5
    chi_square = float(((found[possible] - expected)[likely] ** 2 / expected[likely]).sum())
    degrees = int(likely.sum()) - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees) + 4


@every_set
@pytest.mark.parametrize("vocab", [1, 16, 17, 1025, 5000])
def test_logits_that_are_not_finite_have_no_token(instruction_set: str, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((4, vocab)).astype(np.float32)
    logits[0, -1], logits[1, vocab // 2], logits[2] = np.nan, np.inf, -np.inf
    for values in SETTINGS:
        tokens = native(instruction_set).choose(logits, draws(rng, 4, **values))
        assert tokens[:3].tolist() == [-1, -1, -1] and tokens[3] >= 0


@every_set
def test_neither_threads_nor_other_rows_matter(instruction_set: str) -> None:
    rng = np.random.default_rng(8)
    apart = rng.standard_normal((61, 6000)).astype(np.float32).round(2)
    logits = apart[:, 100:5103]
    rows = np.concatenate([draws(rng, 1, **values) for values in SETTINGS * 4])[: len(logits)]
    rows["random"] = rng.random(len(rows))
    together = native(instruction_set, 3).choose(logits, rows)
    alone = [native(instruction_set).choose(logits[i : i + 1].copy(), rows[i : i + 1])[0] for i in range(len(rows))]
    assert together.tolist() == alone
    which, tokens = np.arange(len(rows), dtype=np.int32), together
    found, one = (native(instruction_set, n).logprobs(logits, which, tokens, 20) for n in (3, 1))
    for name in ("values", "ranks", "best_ids", "best_values"):
        np.testing.assert_array_equal(getattr(found, name), getattr(one, name))


@pytest.mark.thinned(1)
@every_set
@pytest.mark.parametrize("kind", ["normal", "steep", "ties", "equal", "masked"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_logprobs_are_those_of_float64(instruction_set: str, vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = logits_of(kind, rng, (4, vocab))
    rows, tokens = np.array([2, 0], np.int32), rng.integers(0, vocab, 2).astype(np.int32)
    for width in (0, 1, 20):
        found = native(instruction_set).logprobs(logits, rows, tokens, width)
        expected = PlainSampler().logprobs(logits, rows, tokens, width)
        np.testing.assert_array_equal(found.ranks, expected.ranks)
        np.testing.assert_array_equal(found.best_ids, expected.best_ids)
        np.testing.assert_allclose(found.values, expected.values, rtol=2e-7, atol=1e-6)
        np.testing.assert_allclose(found.best_values, expected.best_values, rtol=2e-7, atol=1e-6)


@needs_kernels
def test_arrays_that_are_not_as_they_should_be_are_refused() -> None:
    rng, sampler = np.random.default_rng(0), native()
    logits, rows = rng.standard_normal((3, 40)).astype(np.float32), draws(rng, 3)
    one = np.zeros(1, np.int32)
    for wrong in (logits.astype(np.float64), logits[:, ::2], logits[0], logits[:, :0]):
        with pytest.raises(ValueError, match="logits"):
            sampler.choose(wrong, rows)
    with pytest.raises(ValueError, match="draws"):
        sampler.choose(logits, rows[:2])
    with pytest.raises(ValueError, match="tokens"):
        sampler.logprobs(logits, one, one + 40, 1)
    with pytest.raises(ValueError, match="rows"):
        sampler.logprobs(logits, one - 1, one, 1)
