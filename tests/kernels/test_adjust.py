"""Changed logits: numpy against transformers' logits processors and OpenAI's formula, the kernels against numpy."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pypto_serving.backend.numpy_adjust import adjusted
from pypto_serving.backend.numpy_sampler import PlainSampler
from pypto_serving.kernels import runnable
from pypto_serving.types.arrays import pack_ids, unpack_ids
from pypto_serving.types.sampling import RowSampling
from tests.kernels.adjusting import adjustments, mask_of, random_row
from tests.kernels.drawing import draws, native
from tests.needs import needs_kernels
from tests.thinning import examples

VOCABS = (3, 31, 32, 33, 64, 1000, 151_936)


def by_transformers(logits: np.ndarray, row: RowSampling, prompt: list[int], output: list[int]) -> np.ndarray:
    """The changed logits. Penalties of the output follow https://platform.openai.com/docs/advanced-usage."""
    scores, history = torch.from_numpy(logits.copy())[None], torch.tensor([[*prompt, *output]])
    biases = zip(unpack_ids(row.bias_ids).tolist(), np.frombuffer(row.bias_values, "<f4").tolist(), strict=True)
    if row.bias_ids:
        scores = SequenceBiasLogitsProcessor({(token,): value for token, value in biases})(history, scores)
    if row.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(row.repetition_penalty)(history, scores)
    for token, count in Counter(output).items():
        scores[0, token] -= torch.tensor(row.frequency_penalty) * count
        scores[0, token] -= row.presence_penalty
    masked = LogitsProcessorList()
    if row.allowed_ids:
        allowed = unpack_ids(row.allowed_ids).tolist()
        masked.append(PrefixConstrainedLogitsProcessor(lambda _, tokens: allowed, 1))
    if row.min_tokens:
        ends = unpack_ids(row.banned_ids).tolist()
        masked.append(MinNewTokensLengthLogitsProcessor(len(prompt), row.min_tokens, ends, device="cpu"))
    scores = masked(history, scores)
    if row.bad_words:
        words = [unpack_ids(word).tolist() for word in row.bad_words]
        scores = NoBadWordsLogitsProcessor(words)(torch.tensor([output]), scores)
    return scores[0].numpy()


@pytest.mark.parametrize("vocab", [50, 1000, 151_936])
def test_numpy_changes_logits_as_transformers_does(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(8 if vocab > 10_000 else 150):
        logits = (rng.standard_normal(vocab) * 4).astype(np.float32)
        prompt, output = (rng.integers(0, min(vocab, 200), n).tolist() for n in (30, int(rng.integers(5, 60))))
        row = random_row(rng, vocab, [*prompt, *output])
        expected = by_transformers(logits, row, prompt, output)
        if not np.isfinite(expected.max()):
            continue
        made = adjustments([row], [[*prompt, *output]], [len(prompt)], vocab)
        found = logits if made is None else adjusted(logits, made, 0, np.array([*prompt, *output], np.int32))
        np.testing.assert_array_equal(found, expected)


@needs_kernels
@examples(60)
@given(vocab=st.sampled_from(VOCABS[:-1]), seed=st.integers(0, 2**32 - 1), threads=st.sampled_from([1, 3]))
def test_kernels_choose_from_the_logits_that_numpy_changes(vocab: int, seed: int, threads: int) -> None:
    check_kernels(vocab, np.random.default_rng(seed), 12, threads)


@needs_kernels
def test_kernels_choose_from_many_logits(rows: int = 12) -> None:
    check_kernels(151_936, np.random.default_rng(5), rows, 2)


def check_kernels(vocab: int, rng: np.random.Generator, count: int, threads: int) -> None:
    """Each row, with its own changes, masks and filters, chooses what it does from logits that numpy changed."""
    logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32).round(2)
    logits[0, 0], logits[1] = np.nan, -np.inf
    histories = [rng.integers(0, vocab, int(rng.integers(1, 60))).tolist() for _ in range(count)]
    rows = [random_row(rng, vocab, history) for history in histories]
    some = [mask_of(rng.integers(0, vocab, int(rng.integers(0, 40))).tolist(), vocab) for _ in range(count)]
    masks = {row: mask for row, mask in enumerate(some) if rng.random() < 0.4}
    prompt_lens = [int(rng.integers(0, len(history) + 1)) for history in histories]
    made = adjustments(rows, histories, prompt_lens, vocab, masks)
    filters = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.02}]
    chances = np.concatenate([draws(rng, 1, random=rng.random(), **filters[i % len(filters)]) for i in range(count)])
    if made is None:
        return
    changed = logits.copy()
    for i, history in enumerate(histories[2:], start=2):
        changed[i] = adjusted(logits[i], made, i, np.array(history, np.int32))
    before = logits.copy()
    for name in runnable():
        sampler = native(name, threads)
        expected = sampler.choose(changed, chances)
        assert expected[:2].tolist() == [-1, -1] and (expected[2:] >= 0).all()
        np.testing.assert_array_equal(sampler.choose(logits, chances, made), expected)
    np.testing.assert_array_equal(logits, before)
    greedy = draws(rng, count, temperature=0)
    np.testing.assert_array_equal(PlainSampler().choose(logits, greedy, made), PlainSampler().choose(changed, greedy))


SAMPLERS = ("numpy", *runnable())


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("vocab", [40, 64, 5000])
def test_what_leaves_no_token_is_ignored(name: str, vocab: int) -> None:
    sampler = PlainSampler() if name == "numpy" else native(name)
    rng = np.random.default_rng(vocab)
    logits = rng.standard_normal((5, vocab)).astype(np.float32)
    logits[:, 7] = -np.inf
    bans = {"min_tokens": 5, "banned_ids": pack_ids(range(vocab + 5))}
    rows = [
        RowSampling(**bans),
        RowSampling(allowed_ids=pack_ids([3]), **bans),
        RowSampling(allowed_ids=pack_ids([7])),
        RowSampling(bad_words=(pack_ids([3]), pack_ids([3])), allowed_ids=pack_ids([3])),
        RowSampling(),
    ]
    made = adjustments(rows, [[1, 2]] * 5, [1] * 5, vocab, {4: mask_of([], vocab)})
    best = logits.argmax(axis=1).tolist()
    chosen = sampler.choose(logits, draws(rng, 5, temperature=0), made).tolist()
    assert chosen == [best[0], 3, best[2], 3, best[4]]


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_grammars_mask_and_allowed_ids_hold_together(name: str) -> None:
    sampler = PlainSampler() if name == "numpy" else native(name)
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((2, 100)).astype(np.float32)
    rows = [RowSampling(allowed_ids=pack_ids([5, 50, 99])), RowSampling()]
    made = adjustments(rows, [[1]] * 2, [1] * 2, 100, {0: mask_of([4, 50, 99], 100), 1: mask_of([4], 100)})
    for values in ({"temperature": 0}, {}, {"top_k": 1}):
        first, second = sampler.choose(logits, draws(rng, 2, **values), made).tolist()
        assert first in (50, 99) and second == 4


FILTERS = [
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.02, "top_k": 40, "top_p": 0.95},
    {"temperature": 0.5, "min_p": 0.1},
    {"temperature": 2.0},
]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize(("vocab", "values"), list(itertools.product((50, 151_936), FILTERS)))
def test_filters_leave_what_transformers_warpers_leave(name: str, vocab: int, values: dict[str, float]) -> None:
    """With the changes of a row before them. A random number picks the token in whose share it falls."""
    sampler = PlainSampler() if name == "numpy" else native(name)
    rng, count = np.random.default_rng(3), 5 if vocab > 1000 else 60
    logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
    prompt, output = (rng.integers(0, min(vocab, 200), n).tolist() for n in (20, 30))
    row = RowSampling(repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=-0.3)
    made = adjustments([row] * count, [[*prompt, *output]] * count, [len(prompt)] * count, vocab)
    chances = draws(rng, count, **values)
    chances["random"] = rng.random(count)
    tokens = sampler.choose(np.broadcast_to(logits, (count, vocab)), chances, made)
    scores = torch.from_numpy(by_transformers(logits, row, prompt, output))[None]
    shares = shares_of(scores, values)
    ranked = "top_k" in values or "top_p" in values
    order = np.argsort(-scores[0].numpy(), kind="stable") if ranked else np.arange(vocab)
    ends = np.cumsum(shares[order])
    for token, random in zip(tokens.tolist(), chances["random"].tolist(), strict=True):
        (place,) = np.flatnonzero(order == token)
        assert shares[token] > 0 and ends[place] - shares[token] - 1e-5 <= random <= ends[place] + 1e-5


def shares_of(scores: torch.Tensor, values: dict[str, float]) -> np.ndarray:
    """Probabilities after transformers' warpers, in the order of the sampler."""
    warpers: Sequence[tuple[str, type]] = (
        ("temperature", TemperatureLogitsWarper),
        ("min_p", MinPLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
    )
    for name, warper in warpers:
        if name in values:
            scores = warper(values[name])(torch.empty((1, 0), dtype=torch.int64), scores)
    return torch.softmax(scores[0].double(), 0).numpy()


@needs_kernels
def test_arrays_of_other_sizes_are_refused() -> None:
    logits, rng = np.zeros((2, 40), np.float32), np.random.default_rng(0)
    rows = [RowSampling(frequency_penalty=1.0, allowed_ids=pack_ids([1]))] * 3
    with pytest.raises(ValueError, match="2 rows of logits need as many rows of adjustments"):
        native().choose(logits, draws(rng, 2), adjustments(rows, [[1]] * 3, [1] * 3, 40))
    with pytest.raises(ValueError, match="masks have 1 words, too few for 40 logits"):
        native().choose(logits, draws(rng, 2), adjustments(rows[:2], [[1]] * 2, [1] * 2, 30))
