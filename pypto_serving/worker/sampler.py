"""RowSamplers: prepare random numbers and logit adjustments of a step's rows, and sample with a Sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pypto_serving.backend.base import SamplingInputs
from pypto_serving.backend.philox import uniforms
from pypto_serving.types.arrays import Float32Array, Int32Array
from pypto_serving.types.draws import DRAW, Sampler
from pypto_serving.types.sampling import RowSampling
from pypto_serving.worker.logit_adjust import Adjustment, ragged

AHEAD = 16
"""Positions per row whose random numbers are made at once: the cost hardly depends on their number."""


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log-probabilities from the raw logits: the sampled token's value and rank (1 is best), and the top tokens."""

    logprob: float
    rank: int
    top_ids: Int32Array
    top_logprobs: Float32Array


class RowSamplers:
    """Owns the sampling parameters of R rows, as arrays indexed by row. They are set once, with the row.

    Random numbers, adjusted logits and log-probabilities cost nothing while no row needs them.
    """

    def __init__(self, rows: int) -> None:
        self._draws = np.zeros(rows, DRAW)
        self._seeds = np.zeros(rows, np.uint64)
        self._choices = np.zeros(rows, np.uint64)
        self._uniforms = np.zeros((rows, AHEAD))
        self._uniforms_from = np.zeros(rows, np.int32)
        self._num_logprobs = np.full(rows, -1, np.int32)
        self._adjustments: dict[int, Adjustment] = {}
        self._random: set[int] = set()
        self._asking: set[int] = set()

    def set(self, row: int, sampling: RowSampling, prompt_len: int) -> None:
        """Set the sampling parameters of `row`. Its prompt has `prompt_len` tokens."""
        self.clear(row)
        self._draws[row] = (0.0, sampling.top_p, sampling.min_p, sampling.temperature, sampling.top_k)
        self._seeds[row], self._choices[row] = sampling.seed, sampling.choice
        self._uniforms_from[row] = -AHEAD
        self._num_logprobs[row] = sampling.num_logprobs
        adjustment = Adjustment.of(sampling, prompt_len)
        if adjustment is not None:
            self._adjustments[row] = adjustment
        if sampling.temperature > 0:
            self._random.add(row)
        if sampling.num_logprobs >= 0:
            self._asking.add(row)

    def clear(self, row: int) -> None:
        """Clear the sampling parameters of `row`."""
        self._adjustments.pop(row, None)
        self._random.discard(row)
        self._asking.discard(row)
        self._num_logprobs[row] = -1

    def sample(
        self, logits: Float32Array, rows: Int32Array, positions: Int32Array, sampler: Sampler
    ) -> tuple[Int32Array, dict[int, SampledLogprobs]]:
        """Sample tokens int32 [s] from logits [s, vocab], for `rows` [s] at absolute `positions` [s]. Rows may repeat.

        A token is -1 if its logits are not finite. Also return log-probabilities, by index, for rows that ask for them.
        """
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        tokens = sampler.choose(logits, draws)
        if self._adjustments:
            self._choose_again(tokens, logits, rows, positions, draws, sampler)
        return tokens, self._logprobs(tokens, logits, rows, sampler) if self._asking else {}

    def num_logprobs(self, rows: Int32Array) -> Int32Array:
        """Return how many top log-probabilities each of `rows` asks for; -1 for none, not even its token's."""
        found: Int32Array = self._num_logprobs[rows]
        return found

    def inputs(self, rows: Int32Array, owners: Int32Array, positions: Int32Array, vocab_size: int) -> SamplingInputs:
        """Build a device's inputs for `rows` [n], at indices `owners` of a dispatch, sampling from `positions` on."""
        draws = self._draws[rows]
        if self._random:
            draws["random"] = self._random_numbers(rows, positions)
        found = [self._adjustments.get(row) for row in rows.tolist()]
        banned_starts, banned_ids = ragged([() if each is None else each.banned_ids for each in found], np.int32)
        bias_starts, bias_ids = ragged([() if each is None else each.bias_ids for each in found], np.int32)
        _, bias_values = ragged([() if each is None else each.bias_values for each in found], np.float32)
        masked = [i for i, each in enumerate(found) if each is not None and each.allowed_ids.size]
        mask_rows = np.full(len(rows), -1, np.int32)
        mask_rows[masked] = np.arange(len(masked))
        masks = [each.mask(vocab_size) for each in found if each is not None and each.allowed_ids.size]
        return SamplingInputs(
            owners=owners,
            draws=draws,
            seeds=self._seeds[rows],
            choices=self._choices[rows],
            positions=positions,
            banned_starts=banned_starts,
            banned_ids=banned_ids,
            banned_until=np.array([0 if each is None else each.banned_until for each in found], np.int32),
            bias_starts=bias_starts,
            bias_ids=bias_ids,
            bias_values=bias_values,
            masks=np.stack(masks) if masks else np.empty((0, -(-vocab_size // 32)), np.uint32),
            mask_rows=mask_rows,
            num_logprobs=self._num_logprobs[rows],
        )

    def _random_numbers(self, rows: Int32Array, positions: Int32Array) -> NDArray[np.float64]:
        """Return the numbers of `rows`, which may repeat, at `positions`.

        Where a row has none left, all rows get those of their next AHEAD positions.
        """
        index = positions - self._uniforms_from[rows]
        if index.min(initial=0) < 0 or index.max(initial=0) >= AHEAD:
            unique, first = np.unique(rows, return_index=True)  # positions of a row ascend
            ahead = (positions[first][:, None] + np.arange(AHEAD)).ravel().astype(np.uint64)
            seeds, choices = self._seeds[unique].repeat(AHEAD), self._choices[unique].repeat(AHEAD)
            self._uniforms[unique] = uniforms(seeds, choices, ahead).reshape(-1, AHEAD)
            self._uniforms_from[unique] = positions[first]
            index = positions - self._uniforms_from[rows]
        if index.max(initial=0) >= AHEAD:
            return uniforms(self._seeds[rows], self._choices[rows], positions.astype(np.uint64))
        found: NDArray[np.float64] = self._uniforms[rows, index]
        return found

    def _choose_again(
        self,
        tokens: Int32Array,
        logits: Float32Array,
        rows: Int32Array,
        positions: Int32Array,
        draws: NDArray[np.void],
        sampler: Sampler,
    ) -> None:
        """Sample again from adjusted logits, for rows that have an adjustment at their position."""
        changed = [
            (i, adjustment.apply(logits[i], position))
            for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True))
            if (adjustment := self._adjustments.get(row)) is not None and adjustment.is_due(position)
        ]
        if changed:
            index = [i for i, _ in changed]
            tokens[index] = sampler.choose(np.stack([each for _, each in changed]), draws[index])

    def _logprobs(
        self, tokens: Int32Array, logits: Float32Array, rows: Int32Array, sampler: Sampler
    ) -> dict[int, SampledLogprobs]:
        """Return log-probabilities from the raw logits, by index, for rows that ask for them."""
        pairs = enumerate(zip(rows.tolist(), tokens.tolist(), strict=True))
        asking = np.array([i for i, (row, token) in pairs if row in self._asking and token >= 0], np.int32)
        if not asking.size:
            return {}
        counts = self._num_logprobs[rows[asking]]
        found = sampler.logprobs(logits, asking, tokens[asking], int(counts.max()))
        return {
            i: SampledLogprobs(
                float(found.values[j]), int(found.ranks[j]), found.best_ids[j, :count], found.best_values[j, :count]
            )
            for j, (i, count) in enumerate(zip(asking.tolist(), counts.tolist(), strict=True))
        }
