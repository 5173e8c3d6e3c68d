"""Changed logits on the device against numpy, and the tokens that the device keeps for them."""

from __future__ import annotations

import numpy as np
import pytest

from pypto_serving.backend.cuda import sampler
from pypto_serving.backend.numpy_adjust import adjusted
from pypto_serving.kernels.cuda import adjusting, sampling
from pypto_serving.types.arrays import pack_ids
from pypto_serving.types.sampler import LogitAdjustments
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.sampler import RowAdjustments
from tests.backend.cuda.sampling_device import SamplerUnderTest, check_choices
from tests.kernels.adjusting import adjustments, mask_of, random_row
from tests.kernels.drawing import draws


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks and limits: the interpreter takes its time for each step of a kernel, whatever its width."""
    monkeypatch.setattr(sampling, "CHUNK", 64)
    monkeypatch.setattr(adjusting, "BLOCK", 32)
    for module in (sampler, sampling):
        monkeypatch.setattr(module, "LIMIT", 8)


@pytest.mark.parametrize(("vocab", "seed"), [(3, 0), (32, 1), (150, 2)])
def test_rows_choose_from_the_logits_that_numpy_changes(vocab: int, seed: int) -> None:
    """Each row has its own changes, masks and filters; the first ones are not finite."""
    rng, count = np.random.default_rng((vocab, seed)), 8
    logits = (rng.standard_normal((count, vocab)) * 3).astype(np.float32).round(2)
    logits[0, 0], logits[1] = np.nan, -np.inf
    histories = [rng.integers(0, vocab, int(rng.integers(1, 60))).tolist() for _ in range(count)]
    rows = [random_row(rng, vocab, history) for history in histories[:-1]] + [RowSampling()]
    some = [mask_of(rng.integers(0, vocab, int(rng.integers(0, 40))).tolist(), vocab) for _ in range(count)]
    masks = {row: mask for row, mask in enumerate(some) if rng.random() < 0.5}
    prompt_lens = [int(rng.integers(0, len(history) + 1)) for history in histories]
    made = adjustments(rows, histories, prompt_lens, vocab, masks)
    assert made is not None
    filters = [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.02}]
    chances = np.concatenate([draws(rng, 1, random=rng.random(), **filters[i % len(filters)]) for i in range(count)])
    changed, before = logits.copy(), logits.copy()
    for i, history in enumerate(histories[2:], start=2):
        changed[i] = adjusted(logits[i], made, i, np.array(history, np.int32))
    under_test = SamplerUnderTest(count, vocab)
    for _ in range(2):  # the second time, marks of the first must be gone
        found = under_test.sample(logits, chances, positions=made.positions, adjustments=made, num_logprobs=[1] * count)
        check_choices(changed, chances, found.token_ids)
        scores = under_test.sampler._adjustments._memory.scores.cpu().numpy()
        np.testing.assert_array_equal(scores[2:], changed[2:])
        assert found.logprobs is not None
        np.testing.assert_array_equal(found.logprobs.best_ids[2:, 0], before[2:].argmax(axis=1))


@pytest.mark.parametrize("vocab", [40, 130])
def test_what_leaves_no_token_is_ignored(vocab: int) -> None:
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
    chances = draws(rng, 5, temperature=0)
    assert SamplerUnderTest(5, vocab).choose(logits, chances, adjustments=made) == [best[0], 3, best[2], 3, best[4]]


PENALIZED = RowSampling(repetition_penalty=1.4, frequency_penalty=0.8, presence_penalty=0.9)
WORDS = RowSampling(bad_words=tuple(pack_ids([a, b]) for a in range(6) for b in range(0, 12, 2)))


CHANGES = PENALIZED, WORDS, RowSampling()


class Requests:
    """The worker's side of rows that sample in turn, two dispatches ahead of what is collected."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        rows = len(CHANGES)
        self.rng, self.vocab = rng, vocab
        self.tokens = np.zeros((rows, 64), np.int32)
        self.known, self.true = np.zeros(rows, np.int32), [list[int]() for _ in range(rows)]
        self.owner = RowAdjustments(self.tokens, vocab)
        for row in range(rows):
            self.start(row)

    def start(self, row: int) -> None:
        """Give `row` to a new request."""
        length = int(self.rng.integers(2, 40))
        prompt = self.rng.integers(0, self.vocab, length).tolist()
        self.tokens[row, :length], self.known[row], self.true[row] = prompt, length, prompt
        self.owner.clear_row(row)
        self.owner.set_row(row, CHANGES[row], length - 1)

    def given(self, rows: np.ndarray) -> LogitAdjustments | None:
        positions = np.array([len(self.true[row]) for row in rows], np.int32)
        return self.owner.for_rows(rows, positions, self.known[rows])


def test_the_device_keeps_the_tokens_that_it_samples() -> None:
    """Rows get other requests while they are in flight, and the host replaces tokens as a grammar does."""
    rng, count, vocab = np.random.default_rng(2), len(CHANGES), 50
    requests, under_test = Requests(rng, vocab), SamplerUnderTest(count, vocab, slots=3)
    held: list[tuple[int, np.ndarray, list[list[int]], list[int]]] = []

    def collect() -> None:
        under_test.device.finish()
        slot, rows, owners, expected = held.pop(0)
        tokens = under_test.sampler.read(slot).token_ids.tolist()
        for row, owner, token, wanted in zip(rows.tolist(), owners, tokens, expected, strict=True):
            if requests.true[row] is owner:  # else the row has another request
                assert token == wanted
                requests.tokens[row, requests.known[row]] = token
                requests.known[row] += 1

    for step in range(20):
        rows = np.flatnonzero(rng.random(count) < 0.8).astype(np.int32)
        if step % 4 == 3:
            requests.start(int(rng.integers(2)))
        if step % 9 == 8:
            while held:
                collect()
            row = int(rng.integers(2))
            requests.true[row][-1] = requests.tokens[row, requests.known[row] - 1] = int(rng.integers(vocab))
        if not len(rows):
            continue
        logits = rng.standard_normal((len(rows), vocab)).astype(np.float32)
        logits[:, :12] += 1  # bad words have these
        made = requests.given(rows)
        positions = [len(requests.true[row]) for row in rows]
        with under_test.device.queueing():
            greedy = draws(rng, len(rows), temperature=0)
            under_test.submit(step % 3, logits, greedy, rows, positions, adjustments=made)
        expected = []
        for i, row in enumerate(rows.tolist()):
            history = np.array(requests.true[row], np.int32)
            scores = logits[i] if made is None else adjusted(logits[i], made, i, history)
            expected.append(int(scores.argmax()))
            requests.true[row].append(expected[-1])
        held.append((step % 3, rows, [requests.true[row] for row in rows], expected))
        if len(held) > 2:
            collect()
    while held:
        collect()
