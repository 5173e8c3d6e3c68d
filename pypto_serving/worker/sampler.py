"""Sampling of a step's rows: random numbers, banned ids, and a Sampler that does the rest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import DRAW, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.types.tokens import unpack_ids
from pypto_serving.worker.philox import uniforms

AHEAD = 16
"""Positions that random numbers are made for at once: what making them costs hardly depends on how many they are."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Of the raw logits: the chosen token's value and rank (1 is best), and the best tokens, best first."""

    logprob: float
    rank: int
    top_ids: Int32Array
    top_logprobs: Float32Array


class RowSamplers:
    """Owns how each of R rows chooses its tokens: set once with the row, as arrays that a step's rows are taken from.

    What only some rows want (random numbers, banned ids, log-probabilities) costs nothing while no row wants it.
    """

    def __init__(self, rows: int) -> None:
        self._draws = np.zeros(rows, DRAW)
        self._seeds = np.zeros(rows, np.uint64)
        self._choices = np.zeros(rows, np.uint64)
        self._uniforms = np.zeros((rows, AHEAD))
        self._uniforms_from = np.zeros(rows, np.int32)
        self._min_tokens = np.zeros(rows, np.int32)
        self._num_logprobs = np.full(rows, -1, np.int32)
        self._banned: dict[int, Int32Array] = {}
        self._random: set[int] = set()
        self._asking: set[int] = set()

    def set(self, row: int, sampling: RowSampling) -> None:
        """From now on `row` chooses as `sampling` says."""
        self.clear(row)
        self._draws[row] = (0.0, sampling.top_p, sampling.min_p, sampling.temperature, sampling.top_k)
        self._seeds[row], self._choices[row] = sampling.seed, sampling.choice
        self._uniforms_from[row] = -AHEAD
        self._min_tokens[row], self._num_logprobs[row] = sampling.min_tokens, sampling.num_logprobs
        if sampling.min_tokens:
            self._banned[row] = unpack_ids(sampling.banned_ids)
        if sampling.temperature > 0:
            self._random.add(row)
        if sampling.num_logprobs >= 0:
            self._asking.add(row)

    def clear(self, row: int) -> None:
        """Nobody chooses for `row`."""
        self._banned.pop(row, None)
        self._random.discard(row)
        self._asking.discard(row)

    def sample(
        self, logits: Float32Array, rows: Int32Array, positions: Int32Array, num_output: Int32Array, sampler: Sampler
    ) -> tuple[Int32Array, dict[int, SampledLogprobs]]:
        """Tokens int32 [s] for `rows` [s] with logits [s, vocab], and log-probabilities of the rows that ask for them.

        `positions` [s] are the absolute positions of the new tokens, `num_output` [s] how many output tokens each row
        has. Raises RuntimeError for logits that are not finite.
        """
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        tokens = sampler.choose(logits, draws)
        if tokens.min() < 0:
            raise RuntimeError(f"the logits of row {np.argmin(tokens)} of a step are not finite")
        if self._banned:
            self._choose_again(tokens, logits, rows, num_output, draws, sampler)
        return tokens, self._logprobs(tokens, logits, rows, sampler) if self._asking else {}

    def _random_numbers(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.float64]:
        """Of `rows` at `positions`; where one has none left, all get those of their next positions."""
        index = positions - self._uniforms_from[rows]
        if index.min() < 0 or index.max() >= AHEAD:
            ahead = (positions[:, None] + np.arange(AHEAD)).ravel().astype(np.uint64)
            seeds, choices = self._seeds[rows].repeat(AHEAD), self._choices[rows].repeat(AHEAD)
            self._uniforms[rows] = uniforms(seeds, choices, ahead).reshape(-1, AHEAD)
            self._uniforms_from[rows] = positions
            index[:] = 0
        found: NDArray[np.float64] = self._uniforms[rows, index]
        return found

    def _choose_again(
        self,
        tokens: Int32Array,
        logits: Float32Array,
        rows: Int32Array,
        num_output: Int32Array,
        draws: NDArray[np.void],
        sampler: Sampler,
    ) -> None:
        """Without the banned ids, where the row has not enough tokens yet."""
        banning = np.flatnonzero((num_output < self._min_tokens[rows]) & np.isin(rows, list(self._banned)))
        if banning.size:
            allowed = np.stack([_without(self._banned[int(rows[i])], logits[i]) for i in banning.tolist()])
            tokens[banning] = sampler.choose(allowed, draws[banning])

    def _logprobs(
        self, tokens: Int32Array, logits: Float32Array, rows: Int32Array, sampler: Sampler
    ) -> dict[int, SampledLogprobs]:
        """By row, of the raw logits."""
        asking = np.array([i for i, row in enumerate(rows.tolist()) if row in self._asking], np.int32)
        if not asking.size:
            return {}
        counts = self._num_logprobs[rows[asking]]
        found = sampler.logprobs(logits, asking, tokens[asking], int(counts.max()))
        return {
            int(rows[i]): SampledLogprobs(
                float(found.values[j]), int(found.ranks[j]), found.best_ids[j, :count], found.best_values[j, :count]
            )
            for j, (i, count) in enumerate(zip(asking.tolist(), counts.tolist(), strict=True))
        }


def _without(banned: Int32Array, logits: Float32Array) -> Float32Array:
    """`logits` with the banned ids out of reach; as they are where nothing else would be left."""
    scores = logits.copy()
    scores[banned[banned < len(logits)]] = -np.inf
    return scores if np.isfinite(scores.max()) else logits
