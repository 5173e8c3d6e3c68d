"""RowSamplers: prepare random numbers and logit adjustments of a step's rows, and sample with a Sampler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import SamplingInputs
from pypto_serving.backend.numpy_sampler import uniforms
from pypto_serving.types.arrays import Float32Array, Int32Array, pack_ids, unpack_ids
from pypto_serving.types.sampler import DRAW, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.step import TokenLogprobs
from pypto_serving.worker.logit_adjust import RowAdjustments
from pypto_serving.worker.masks import RowMasks

AHEAD = 16
"""Positions to make random numbers for at once: the cost hardly depends on how many they are."""


class RowSamplers:
    """Owns the sampling parameters of R rows, as arrays indexed by row. They are set once, with the row.

    Random numbers, adjusted logits and log-probabilities cost nothing while no row needs them. `masks` is where a
    grammar puts the tokens that a row may choose next: `masks.put(row, draft, bits)`, before `sample` or `inputs`.
    `tokens` [R, max_model_len] are those of the rows, kept up to date by their owner.
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
        self._random: set[int] = set()
        self._asking: set[int] = set()
        self._named: dict[int, Int32Array] = {}

    @property
    def masks(self) -> RowMasks:
        return self._adjustments.masks

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
        """Return how `rows` [s] choose, and their random numbers at absolute `positions` [s]: DRAWs [s]."""
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        return draws

    def num_logprobs(self, rows: Int32Array) -> Int32Array:
        """Return how many top log-probabilities each of `rows` asks for; -1 for none, not even its token's."""
        found: Int32Array = self._num_logprobs[rows]
        return found

    def inputs(self, rows: Int32Array, owners: Int32Array, positions: Int32Array, known: Int32Array) -> SamplingInputs:
        """Build a device's inputs for `rows` [n], at indices `owners` of a dispatch, sampling from `positions` on.

        `known` [n] is how many tokens of each row have been collected.
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
        """Return the numbers of `rows` at `positions`; a row may repeat, with its next positions.

        If one row has none left, make the next for all.
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

        Tokens that a row names stand in place of the top ones.
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
                # All log-probabilities of a position are its logits less one value, known from the chosen token.
                ids, values = named, found.values[j] + (logits[i, named] - logits[i, tokens[i]])
            made[i] = pack_logprobs(found.values[j], found.ranks[j], ids, values)
        return made


def pack_logprobs(logprob: float, rank: int, top_ids: Int32Array, top_logprobs: Float32Array) -> TokenLogprobs:
    """Encode the log-probability and rank of a token (1 is best), and the top tokens."""
    return TokenLogprobs(float(logprob), int(rank), pack_ids(top_ids), top_logprobs.astype("<f4").tobytes())
