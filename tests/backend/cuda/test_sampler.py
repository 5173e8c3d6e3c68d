"""DeviceSampler against PlainSampler, on work that the device does later."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pypto_serving.backend.cuda import sampler
from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.kernels.cuda import sampling
from tests.backend.cuda.sampling_device import SETTINGS, SamplerUnderTest, check_choices
from tests.kernels.drawing import draws, logits_of
from tests.thinning import examples

KINDS = ("normal", "steep", "narrow", "ties", "equal", "masked")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and limits, since the interpreter takes its time for each step of a kernel."""
    monkeypatch.setattr(sampling, "CHUNK", 32)
    monkeypatch.setattr(sampling, "LIMIT", 8)
    monkeypatch.setattr(sampling, "WAYS", 64)
    monkeypatch.setattr(sampler, "LIMIT", 8)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("vocab", "kind"), [(75, kind) for kind in KINDS] + [(1, "normal"), (32, "ties")])
def test_rows_choose_what_numpy_does(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    chances = np.concatenate([draws(rng, 1, random=rng.random(), **values) for values in SETTINGS])
    logits = logits_of(kind, rng, (len(chances), vocab))
    check_choices(logits, chances, SamplerUnderTest(len(chances), vocab).choose(logits, chances))


def test_rows_of_usual_vocabularies_choose_what_numpy_does() -> None:
    rng, usual = np.random.default_rng(5), ({}, {"top_k": 20, "top_p": 0.95, "temperature": 0.6}, {"top_p": 0.8})
    chances = np.concatenate([draws(rng, 1, random=rng.random(), **values) for values in usual])
    logits = logits_of("steep", rng, (len(chances), 5000))
    check_choices(logits, chances, SamplerUnderTest(len(chances), 5000).choose(logits, chances))


@pytest.mark.usefixtures("small")
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    vocab=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([1e-6, 0.1, 3.0, 100.0]),
    temperature=st.sampled_from([1e-20, 0.3, 1.0, 100.0]),
    top_k=st.one_of(st.just(0), st.integers(0, 80)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-12, 1)),
    min_p=st.sampled_from([0.0, 0.0, 1e-300, 0.1, 1.0]),
    random=st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53])),
)
def test_a_draw_follows_the_definition(
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
    chances = draws(rng, 1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, random=random)
    check_choices(logits, chances, SamplerUnderTest(1, vocab).choose(logits, chances))


@pytest.mark.parametrize("vocab", [1, 16, 1025])
def test_logits_that_are_not_finite_have_no_token(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((8, vocab)).astype(np.float32)
    logits[0::4, -1], logits[1::4, vocab // 2], logits[2::4] = np.nan, np.inf, -np.inf
    chances = draws(rng, 8)
    chances["temperature"][:4] = 0
    under_test = SamplerUnderTest(8, vocab)
    tokens = under_test.choose(logits, chances)
    assert tokens[:3] == tokens[4:7] == [-1, -1, -1] and min(tokens[3], tokens[7]) >= 0
    assert under_test.sampler.last_tokens.tolist() == tokens


def test_dispatches_wait_with_their_own_parameters() -> None:
    """A slot is filled while the device still has the work of the other one, and keeps what it sampled."""
    rng, under_test = np.random.default_rng(1), SamplerUnderTest(4, 700)
    logits = logits_of("normal", rng, (5, 700))
    first, second = draws(rng, 3), draws(rng, 2, temperature=0)
    with under_test.device.queueing():
        under_test.submit(0, logits, first, workers=[2, 0, 3])
        under_test.submit(1, logits[3:], second, workers=[1, 3])
    assert under_test.sampler.last_tokens.tolist() == [-1] * 4
    under_test.device.finish()
    found = [under_test.sampler.read(slot) for slot in (0, 1)]
    assert [each.counts.tolist() for each in found] == [[1] * 3, [1] * 2]
    expected = [*PlainSampler().choose(logits[:3], first), *PlainSampler().choose(logits[3:], second)]
    assert [token for each in found for token in each.token_ids.tolist()] == expected
    assert under_test.sampler.last_tokens.tolist() == [expected[1], expected[3], expected[0], expected[4]]
    under_test.submit(0, logits[:0], first[:0])
    assert under_test.sampler.read(0).token_ids.tolist() == []


@pytest.mark.usefixtures("small")
def test_other_rows_do_not_matter() -> None:
    some = SETTINGS[1::3]
    rng, vocab, count = np.random.default_rng(8), 60, len(some)
    logits = logits_of("ties", rng, (count, vocab))
    chances = np.concatenate([draws(rng, 1, random=rng.random(), **values) for values in some])
    together = SamplerUnderTest(count, vocab).choose(logits, chances)
    other = SamplerUnderTest(40, vocab)
    assert [other.choose(logits[i : i + 1], chances[i : i + 1])[0] for i in range(count)] == together


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["normal", "ties", "masked"])
@pytest.mark.parametrize("vocab", [3, 70])
def test_logprobs_are_those_of_numpy(vocab: int, kind: str) -> None:
    """Rows that ask for none, and one without a token, are among the rows."""
    rng = np.random.default_rng(vocab)
    logits = logits_of(kind, rng, (5, vocab))
    logits[3, 0] = np.nan
    chances, rows = draws(rng, 5, random=0.6, temperature=1.5), np.array([0, 2, 4], np.int32)
    for asked in ([0, -1, 0, 0, 0], [2, -1, 20, 1, 5]):
        found = SamplerUnderTest(5, vocab).sample(logits, chances, num_logprobs=asked)
        assert found.logprobs is not None and found.token_ids[3] == -1
        expected = PlainSampler().logprobs(logits, rows, found.token_ids[rows], max(asked))
        np.testing.assert_array_equal(found.logprobs.ranks[rows], expected.ranks)
        np.testing.assert_array_equal(found.logprobs.best_ids[rows], expected.best_ids)
        np.testing.assert_allclose(found.logprobs.values[rows], expected.values, rtol=2e-7, atol=1e-6)
        np.testing.assert_allclose(found.logprobs.best_values[rows], expected.best_values, rtol=2e-7, atol=1e-6)
    assert SamplerUnderTest(5, vocab).sample(logits, chances).logprobs is None
