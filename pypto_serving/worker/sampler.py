"""RowSamplers: random numbers and logit adjustments of a step's rows, for the Sampler that chooses their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pypto_serving.backend.base import SamplingInputs
from pypto_serving.backend.numpy_sampler import uniforms
from pypto_serving.types.arrays import Float32Array, Int32Array, pack_ids, unpack_ids
from pypto_serving.types.sampler import CHANGE, DRAW, ChangeTable, LogitAdjustments, Sampler
from pypto_serving.types.sampling import INT32_MAX, RowSampling
from pypto_serving.types.step import TokenLogprobs
from pypto_serving.worker.masks import RowMasks


class RowAdjustments:
    """Owns the logit adjustments of R rows, set once with the row. They cost nothing while no row has any.

    `tokens` [R, max_model_len] are the rows' tokens, which their owner keeps up to date. Penalties and bad words are
    computed from these when a token is sampled, so no other state must follow appended, rejected or initial tokens.
    """

    def __init__(self, tokens: Int32Array, vocab_size: int, max_drafts: int = 0) -> None:
        self.masks = RowMasks(len(tokens), vocab_size, max_drafts)
        self._tokens = tokens
        self._given: dict[int, tuple[RowSampling, int]] = {}
        self._until: Int32Array = np.zeros(len(tokens), np.int32)
        self._table: ChangeTable | None = None

    def set_row(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Set the adjustments of `sampling`. The prompt of `row` has `prompt_len` tokens."""
        if sampling.allowed_ids:
            self.masks.allow(row, unpack_ids(sampling.allowed_ids))
        if sampling.bias_ids or sampling.bad_words or sampling.has_penalties:
            self._until[row] = INT32_MAX
        elif sampling.min_tokens and sampling.banned_ids:
            self._until[row] = prompt_len + sampling.min_tokens
        else:
            return
        self._given[row] = sampling, prompt_len
        self._table = None

    def clear_row(self, row: int) -> None:
        """Forget the adjustments of `row`."""
        self.masks.clear(row)
        if self._given.pop(row, None) is not None:
            self._until[row] = 0
            self._table = None

    def for_rows(self, rows: Int32Array, positions: Int32Array, known: Int32Array) -> LogitAdjustments | None:
        """Return the adjustments of `rows` [n] for the tokens at `positions` [n], or None if there are none.

        See LogitAdjustments for `known` [n]. Rows may repeat, with consecutive positions.
        """
        if not (self._given or self.masks):
            return None
        due = np.where(known < self._until[rows], rows, np.int32(-1))
        masked = self.masks.find(rows)
        if max(due.max(initial=-1), masked.max(initial=-1)) < 0:
            return None
        if self._table is None:
            self._table = _table(self._given, len(self._until))
        return LogitAdjustments(
            rows=due,
            positions=positions,
            known=known,
            tokens=self._tokens,
            table=self._table,
            masks=self.masks.bits,
            mask_rows=masked,
        )


def _table(given: dict[int, tuple[RowSampling, int]], num_rows: int) -> ChangeTable:
    """Make the table of adjustments of the rows in `given`."""
    changes = np.zeros(num_rows, CHANGE)
    sampling = [each for each, _ in given.values()]
    biases = [np.frombuffer(each.bias_values, "<f4") for each in sampling]
    bans = [unpack_ids(each.banned_ids) for each in sampling]
    words = [unpack_ids(word) for each in sampling for word in each.bad_words]
    counts = np.array(
        [[len(bias), len(ban), len(each.bad_words)] for bias, ban, each in zip(biases, bans, sampling, strict=True)]
    ).reshape(-1, 3)
    ends = counts.cumsum(axis=0)
    for i, (row, (each, prompt_len)) in enumerate(given.items()):
        intervals = np.stack([ends[i] - counts[i], ends[i]], axis=1).ravel().tolist()
        penalties = each.repetition_penalty, each.frequency_penalty, each.presence_penalty
        changes[row] = (*penalties, prompt_len, prompt_len + each.min_tokens, *intervals)
    return ChangeTable(
        changes=changes,
        bias_ids=_joined([unpack_ids(each.bias_ids) for each in sampling], np.int32),
        bias_values=_joined(biases, np.float32),
        banned_ids=_joined(bans, np.int32),
        word_starts=np.cumsum([0, *map(len, words)], dtype=np.int32),
        words=_joined(words, np.int32),
    )


def _joined(arrays: Sequence[NDArray[Any]], dtype: DTypeLike) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)


AHEAD = 16
"""Generate random numbers for this many positions at once, since the cost hardly depends on their number."""


class RowSamplers:
    """Owns the sampling parameters of R rows, as arrays indexed by row. They are set once, with the row.

    Random numbers, adjusted logits and log-probabilities cost nothing while no row needs them. Grammars set the tokens
    that a row may choose next by `masks.put(row, draft, bits)`, before `sample` or `inputs`. The rows' owner keeps
    `tokens` [R, max_model_len] up to date.
    """

    def __init__(self, tokens: Int32Array, vocab_size: int, max_drafts: int = 0) -> None:
        rows = len(tokens)
        self._ahead = max(AHEAD, 1 + max_drafts)
        self._draws = np.zeros(rows, DRAW)
        self._seeds = np.zeros(rows, np.uint64)
        self._choices = np.zeros(rows, np.uint64)
        self._uniforms = np.zeros((rows, self._ahead))
        self._uniforms_from = np.zeros(rows, np.int32)
        self._num_logprobs = np.full(rows, -1, np.int32)
        self._adjustments = RowAdjustments(tokens, vocab_size, max_drafts)
        self.masks = self._adjustments.masks
        self._random: set[int] = set()
        self._asking: set[int] = set()
        self._named: dict[int, Int32Array] = {}

    def set_row(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Set the sampling parameters of `row`. Its prompt has `prompt_len` tokens."""
        self.clear_row(row)
        self._draws[row] = (0.0, sampling.top_p, sampling.min_p, sampling.temperature, sampling.top_k)
        self._seeds[row], self._choices[row] = sampling.seed, sampling.choice
        self._uniforms_from[row] = -self._ahead
        self._num_logprobs[row] = sampling.num_logprobs
        self._adjustments.set_row(row, sampling, prompt_len)
        if sampling.temperature > 0:
            self._random.add(row)
        if sampling.num_logprobs >= 0:
            self._asking.add(row)
        if sampling.logprob_ids:
            self._named[row] = unpack_ids(sampling.logprob_ids)

    def clear_row(self, row: int) -> None:
        """Clear the sampling parameters of `row`."""
        self._adjustments.clear_row(row)
        self._random.discard(row)
        self._asking.discard(row)
        self._named.pop(row, None)
        self._num_logprobs[row] = -1

    def sample(
        self, logits: Float32Array, rows: Int32Array, positions: Int32Array, sampler: Sampler
    ) -> tuple[Int32Array, dict[int, TokenLogprobs]]:
        """Sample tokens int32 [s] from logits [s, vocab], for `rows` [s] at absolute `positions` [s]. Rows may repeat.

        A token is -1 if its logits are not finite. Also return log-probabilities, by index, for rows that ask for them.
        """
        draws = self.draws(rows, positions)
        tokens = sampler.choose(logits, draws, self._adjustments.for_rows(rows, positions, positions))
        return tokens, self._logprobs(tokens, logits, rows, sampler) if self._asking else {}

    def draws(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.void]:
        """Return DRAWs [s]: the sampling parameters of `rows` [s], and random numbers for absolute `positions` [s]."""
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        return draws

    def num_logprobs(self, rows: Int32Array) -> Int32Array:
        """Return how many top log-probabilities each of `rows` asks for; -1 for no log-probabilities at all."""
        found: Int32Array = self._num_logprobs[rows]
        return found

    def inputs(self, rows: Int32Array, owners: Int32Array, positions: Int32Array, known: Int32Array) -> SamplingInputs:
        """Build a device's inputs for `rows` [n], at indices `owners` in a dispatch, sampling from `positions` on.

        `known` [n]: number of collected tokens of each row.
        """
        return SamplingInputs(
            owners=owners,
            draws=self.draws(rows, positions),
            seeds=self._seeds[rows],
            choices=self._choices[rows],
            positions=positions,
            num_logprobs=self._num_logprobs[rows],
            adjustments=self._adjustments.for_rows(rows, positions, known),
        )

    def _random_numbers(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.float64]:
        """Return the random numbers of `rows` at `positions`; a row may repeat, with consecutive positions.

        If any row has no numbers left, generate the next ones for all rows.
        """
        ahead, index = self._ahead, positions - self._uniforms_from[rows]
        if index.min(initial=0) < 0 or index.max(initial=0) >= ahead:
            unique, first = np.unique(rows, return_index=True)
            nexts = (positions[first][:, None] + np.arange(ahead)).ravel().astype(np.uint64)
            seeds, choices = self._seeds[unique].repeat(ahead), self._choices[unique].repeat(ahead)
            self._uniforms[unique] = uniforms(seeds, choices, nexts).reshape(-1, ahead)
            self._uniforms_from[unique] = positions[first]
            index = positions - self._uniforms_from[rows]
        found: NDArray[np.float64] = self._uniforms[rows, index]
        return found

    def _logprobs(
        self, tokens: Int32Array, logits: Float32Array, rows: Int32Array, sampler: Sampler
    ) -> dict[int, TokenLogprobs]:
        """Return log-probabilities from the raw logits, by index, for rows that ask for them.

        If a row names tokens, return these instead of the top ones.
        """
        pairs = enumerate(zip(rows.tolist(), tokens.tolist(), strict=True))
        asking = np.array([i for i, (row, token) in pairs if row in self._asking and token >= 0], np.int32)
        if not asking.size:
            return {}
        counts = self._num_logprobs[rows[asking]]
        found = sampler.logprobs(logits, asking, tokens[asking], int(counts.max()))
        made: dict[int, TokenLogprobs] = {}
        for j, (i, count) in enumerate(zip(asking.tolist(), counts.tolist(), strict=True)):
            ids, values = found.best_ids[j, :count], found.best_values[j, :count]
            if (named := self._named.get(int(rows[i]))) is not None:
                # Log-probabilities are logits minus a constant per position, known from the chosen token.
                ids, values = named, found.values[j] + (logits[i, named] - logits[i, tokens[i]])
            made[i] = pack_logprobs(found.values[j], found.ranks[j], ids, values)
        return made


def pack_logprobs(logprob: float, rank: int, top_ids: Int32Array, top_logprobs: Float32Array) -> TokenLogprobs:
    """Encode the log-probability and rank of a token (1 is best), and the top tokens."""
    return TokenLogprobs(float(logprob), int(rank), pack_ids(top_ids), top_logprobs.astype("<f4").tobytes())
