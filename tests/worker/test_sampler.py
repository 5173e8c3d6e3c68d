"""The sampler: its generator, its filters against plain definitions, and that rows do not see each other."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pypto_serving.backend.numpy_sampler import PlainSampler, philox4x32, uniforms
from pypto_serving.kernels import Engine, NativeSampler, runnable
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.sampler import Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import TokenLogprobs
from pypto_serving.worker.sampler import AHEAD, RowSamplers
from tests.thinning import examples

KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.fixture(scope="module", params=["numpy", *runnable()])
def chooser(request: pytest.FixtureRequest) -> Sampler:
    return PlainSampler() if request.param == "numpy" else NativeSampler(Engine(request.param))


class Unpacked(NamedTuple):
    logprob: float
    rank: int
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def unpack(values: dict[int, TokenLogprobs]) -> dict[int, Unpacked]:
    return {
        i: Unpacked(each.logprob, each.rank, unpack_ids(each.top_ids), np.frombuffer(each.top_logprobs, "<f4"))
        for i, each in values.items()
    }


def sample_rows(
    chooser: Sampler, logits: np.ndarray, rows: list[RowSampling], positions: np.ndarray, num_output: np.ndarray
) -> tuple[np.ndarray, dict[int, Unpacked]]:
    """Tokens of a step whose row i samples as rows[i] says, and its log-probabilities by row."""
    samplers = RowSamplers(np.zeros((len(rows), 16), np.int32), logits.shape[1])
    for i, row in enumerate(rows):
        samplers.set_row(i, row, int(positions[i] - num_output[i]))
    tokens, values = samplers.sample(logits, np.arange(len(rows), dtype=np.int32), positions, chooser)
    return tokens, unpack(values)


def sample(chooser: Sampler, logits: np.ndarray, row: RowSampling, num_output: int = 0) -> int:
    position, output = np.array([7], dtype=np.int32), np.array([num_output], dtype=np.int32)
    tokens, _ = sample_rows(chooser, logits[None], [row], position, output)
    return int(tokens[0])


def random_logits(size: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    """The vectors that Random123 ships."""
    found = philox4x32(np.array([counter], dtype=np.uint64).T, np.array([key], dtype=np.uint64).T)
    assert found.T.tolist() == [words]


def test_uniforms_differ_in_every_argument_and_fill_the_interval() -> None:
    def one(seed: int, choice: int, position: int, draw: int) -> float:
        arrays = (np.array([value], dtype=np.uint64) for value in (seed, choice, position))
        return float(uniforms(*arrays, draw)[0])

    values = {one(*arguments) for arguments in [(1, 1, 1, 0), (2, 1, 1, 0), (1, 2, 1, 0), (1, 1, 2, 0), (1, 1, 1, 1)]}
    assert len(values) == 5
    positions = np.arange(20_000, dtype=np.uint64)
    many = uniforms(np.full_like(positions, 2**63 + 5), np.zeros_like(positions), positions)
    counts, _ = np.histogram(many, bins=20, range=(0, 1))
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8, "19 degrees of freedom, p = 0.001"


def test_greedy_takes_the_lowest_id_of_equals(chooser: Sampler) -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[[17, 40]] = 5
    assert sample(chooser, logits, RowSampling()) == 17


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_no_token(chooser: Sampler, value: float) -> None:
    logits = random_logits(50)
    logits[3] = value
    for hidden in (
        RowSampling(),
        RowSampling(allowed_ids=pack_ids([4])),
        RowSampling(min_tokens=1, banned_ids=pack_ids([3])),
    ):
        assert sample(chooser, logits, hidden) == -1


def test_banned_ids_until_min_tokens(chooser: Sampler) -> None:
    logits = random_logits(50)
    best = int(logits.argmax())
    row = RowSampling(min_tokens=3, banned_ids=pack_ids([best]))
    assert sample(chooser, logits, row, num_output=2) != best
    assert sample(chooser, logits, row, num_output=3) == best
    warm = RowSampling(temperature=1.0, min_tokens=3, banned_ids=pack_ids(range(49)))
    assert sample(chooser, logits, warm) == 49


def test_banning_everything_bans_nothing(chooser: Sampler) -> None:
    logits = random_logits(50)
    for row in (RowSampling(), RowSampling(temperature=1.0, top_k=5), RowSampling(temperature=1.0, top_p=0.5)):
        all_banned = RowSampling(row.temperature, row.top_k, row.top_p, min_tokens=3, banned_ids=pack_ids(range(60)))
        assert 0 <= sample(chooser, logits, all_banned) < 50


def test_bans_do_not_lift_what_is_allowed(chooser: Sampler) -> None:
    """An end token that is allowed alone comes before min_tokens: nothing else may be chosen."""
    row = RowSampling(temperature=1.0, min_tokens=3, banned_ids=pack_ids([7]), allowed_ids=pack_ids([7]))
    assert sample(chooser, random_logits(50), row) == 7


def plain_distribution(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """Probabilities by the definition: temperature, min_p, top_k, top_p, full sorts everywhere."""
    scores = logits.astype(np.float64) / row.temperature
    weights = np.exp(scores - scores.max())
    if row.min_p:
        weights[weights < row.min_p * weights.max() * (1 - 1e-6)] = 0
    order = np.lexsort((np.arange(len(weights)), -logits))
    if row.top_k:
        weights[order[row.top_k :]] = 0
    weights /= weights.sum()
    if row.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= row.top_p]] = 0
    return weights / weights.sum()


@pytest.mark.parametrize(
    "row",
    [
        RowSampling(temperature=1.0),
        RowSampling(temperature=0.5, top_k=5),
        RowSampling(temperature=1.3, top_p=0.8),
        RowSampling(temperature=1.0, min_p=0.1),
        RowSampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01),
    ],
)
def test_frequencies_follow_the_definition(chooser: Sampler, row: RowSampling) -> None:
    logits, count = random_logits(60, scale=2.0), 5_000
    rows = [row] * count
    positions = np.arange(count, dtype=np.int32)
    many, outputs = np.broadcast_to(logits, (count, 60)), np.zeros(count, np.int32)
    tokens, _ = sample_rows(chooser, many, rows, positions, outputs)
    expected = plain_distribution(logits, row) * count
    observed = np.bincount(tokens, minlength=60)
    assert (observed[expected == 0] == 0).all()
    likely = expected > 5
    chi_square = ((observed[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    degrees = int(likely.sum()) - 1
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees) + 4


@examples(60)
@given(
    size=st.sampled_from([7, 900, 1500, 5000]),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 3, 2000]),
    top_p=st.sampled_from([0.05, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
)
def test_a_row_does_not_see_the_others(
    chooser: Sampler, size: int, seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((9, size)).astype(np.float32).round(1)
    row = RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    rows = [RowSampling(), row, RowSampling(temperature=1.0, seed=3)] * 3
    positions, outputs = np.arange(9, dtype=np.int32), np.zeros(9, dtype=np.int32)
    together, _ = sample_rows(chooser, logits, rows, positions, outputs)
    for i in range(9):
        part = slice(i, i + 1)
        alone, _ = sample_rows(chooser, logits[part].copy(), rows[part], positions[part], outputs[part])
        assert alone[0] == together[i]


def test_logprobs_are_of_the_raw_logits(chooser: Sampler) -> None:
    logits = random_logits(40)[None]
    best = pack_ids([int(logits.argmax())])
    row = RowSampling(temperature=2.0, seed=11, min_tokens=1, banned_ids=best, num_logprobs=5)
    tokens, found = sample_rows(chooser, logits, [row], np.array([3], np.int32), np.array([0], np.int32))
    values = found[0]
    expected = logits[0] - np.log(np.exp(logits[0].astype(np.float64)).sum())
    order = np.argsort(-logits[0], kind="stable")
    assert values.logprob == pytest.approx(expected[tokens[0]], abs=1e-6)
    assert order[values.rank - 1] == tokens[0]
    assert values.top_ids.tolist() == order[:5].tolist()
    np.testing.assert_allclose(values.top_logprobs, expected[order[:5]], atol=1e-6)


def test_each_row_gets_the_logprobs_that_it_asks_for(chooser: Sampler) -> None:
    logits = np.stack([random_logits(40, seed) for seed in range(4)])
    rows = [RowSampling(num_logprobs=count) for count in (-1, 0, 3, 50)]
    tokens, values = sample_rows(chooser, logits, rows, np.arange(4, dtype=np.int32), np.zeros(4, np.int32))
    assert {row: len(value.top_ids) for row, value in values.items()} == {1: 0, 2: 3, 3: 40}
    assert all(value.rank == 1 for value in values.values())
    assert values[2].top_ids[0] == tokens[2]
    assert values[2].top_logprobs[0] == np.float32(values[2].logprob)


def test_a_row_gets_the_logprobs_of_tokens_that_it_names(chooser: Sampler) -> None:
    """In the order in which it names them, however unlikely they are; the next row of the place gets the best again."""
    logits = np.stack([random_logits(640, seed) for seed in range(2)])
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    named = np.argsort(logits[0])[[0, 639, 300]].astype(np.int32)
    samplers, steps = RowSamplers(np.zeros((2, 8), np.int32), 640), np.arange(2, dtype=np.int32)
    for row, ids in enumerate((pack_ids(named), b"")):
        samplers.set_row(row, RowSampling(num_logprobs=2, logprob_ids=ids), 0)
    found = unpack(samplers.sample(logits, steps, steps, chooser)[1])
    assert found[0].top_ids.tolist() == named.tolist() and len(found[1].top_ids) == 2
    np.testing.assert_allclose(found[0].top_logprobs, expected[0][named], atol=2e-5)
    samplers.set_row(0, RowSampling(num_logprobs=1), 0)
    found = unpack(samplers.sample(logits, steps, steps, chooser)[1])
    assert found[0].top_ids.tolist() == [named[1]]


def test_rows_with_drafts_draw_what_each_position_draws_alone(chooser: Sampler) -> None:
    """Rows may have several positions in a step, more of them than numbers are made ahead."""
    history = np.zeros((3, 64), np.int32)
    samplers, alone = RowSamplers(history, 50, max_drafts=AHEAD + 2), RowSamplers(history, 50)
    for row in range(3):
        for each in (samplers, alone):
            each.set_row(row, RowSampling(temperature=1.5, seed=row, choice=row), 0)
    widths = np.array([1, 4, AHEAD + 3])
    rows = np.arange(3, dtype=np.int32).repeat(widths)
    positions = np.concatenate([5 * row + np.arange(width) for row, width in enumerate(widths)]).astype(np.int32)
    logits = np.stack([random_logits(50, seed) for seed in range(len(rows))])
    tokens, _ = samplers.sample(logits, rows, positions, chooser)
    for i in range(len(rows)):
        one = slice(i, i + 1)
        assert alone.sample(logits[one], rows[one], positions[one], chooser)[0][0] == tokens[i]
